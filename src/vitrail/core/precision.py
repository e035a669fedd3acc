"""The precisions that networks compute in, by name."""

from typing import Final, Literal, TypeAlias

# float32 throughout; float32 weights under bfloat16 autocast; weights and activations in bfloat16; the same with the
# layers' products in fp8.
Precision: TypeAlias = Literal["float32", "autocast", "bfloat16", "fp8"]
PrecisionChoice: TypeAlias = Literal["auto", "float32", "autocast", "bfloat16", "fp8"]

HALF: Final = ("bfloat16", "fp8")  # those with bfloat16 weights
FLOAT8_CAPABILITY: Final = (8, 9)  # compute capability of the first GPUs with fp8 tensor cores
