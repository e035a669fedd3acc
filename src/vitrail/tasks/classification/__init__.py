"""One class for each image, several, or ReaL labels."""
