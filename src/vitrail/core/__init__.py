"""What everything else stands on: errors, the shape legend, printing. Imports nothing of vitrail and no torch."""
