"""A mask for each object."""
