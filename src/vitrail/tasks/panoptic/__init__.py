"""Panoptic segmentation: one segment per pixel, of a thing or of stuff."""
