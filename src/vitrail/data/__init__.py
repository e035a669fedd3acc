"""Data sets, from image files to tensors. Independent of any model."""
