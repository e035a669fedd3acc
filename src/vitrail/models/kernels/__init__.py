"""Fused operators and the Triton kernels behind them."""
