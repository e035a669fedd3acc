"""Semantic segmentation: a class for each pixel."""
