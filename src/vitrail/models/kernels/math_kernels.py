"""Exponential, reciprocal and byte permutation as single instructions of an NVIDIA GPU. The first two flush subnormal
numbers to 0.

Triton's own versions take several instructions. They are used on other GPUs and in Triton's interpreter.
"""

import os
from typing import Any

import torch
import triton
import triton.language as tl

# Triton code is not ordinary Python: names have no types, and annotations address Triton's compiler.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportInvalidTypeForm=false, reportMissingImports=false, reportGeneralTypeIssues=false

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes"))
NVIDIA = tl.constexpr(not INTERPRETED.value and torch.version.hip is None)


@triton.jit
def exp2(x) -> Any:
    if NVIDIA:
        out = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        out = tl.exp2(x)
    return out


@triton.jit
def reciprocal(x) -> Any:
    if NVIDIA:
        out = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        out = 1 / x
    return out


@triton.jit
def pick_bytes(a, b, which: tl.constexpr) -> Any:
    """Picks four bytes from two words, by the digits of `which` from the last: 0 to 3 from a, 4 to 7 from b."""
    if NVIDIA:
        chosen: tl.constexpr = which
        out = tl.inline_asm_elementwise(
            f"prmt.b32 $0, $1, $2, {chosen};", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1
        )
    else:
        out = a & 0
        for digit in tl.static_range(4):
            byte: tl.constexpr = (which >> (4 * digit)) & 7
            word = a if byte < 4 else b
            out = out | (((word >> (8 * (byte % 4))) & 255) << (8 * digit))
    return out
