"""A class for each pixel, and objects told apart."""
