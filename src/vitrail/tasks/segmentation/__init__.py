"""A class for each pixel."""
