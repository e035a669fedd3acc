"""Fused operators and the Triton kernels behind them."""


def ceil_divide(count: int, size: int) -> int:
    return -(-count // size)
