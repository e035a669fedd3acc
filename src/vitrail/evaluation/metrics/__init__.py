"""What is counted: accuracy, calibration, intervals, several labels per image."""
