"""Instance segmentation: a mask for each object."""
