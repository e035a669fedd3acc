"""Exponential and reciprocal as an NVIDIA GPU has them: one instruction each, which takes subnormal numbers for 0.

Triton's own are four and five. They stand in where there are no such instructions, and in Triton's interpreter.
"""

import os
from typing import Any

import torch
import triton
import triton.language as tl

# What Triton compiles is not Python: names have no types, and annotations are marks for its compiler.
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
