"""Images and patches of another size: how grids of vectors are interpolated, and what kernels patches get then."""
