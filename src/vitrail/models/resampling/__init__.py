"""Resampling for images and patches of another size: interpolates grids of vectors, and resizes patch kernels."""
