"""The precisions that networks compute in, by name."""

from typing import Final, Literal, TypeAlias

# float32 throughout; float32 weights under bfloat16 autocast; weights that are bfloat16 themselves; the same with
# products of layers that read eight bits.
Precision: TypeAlias = Literal["float32", "autocast", "bfloat16", "fp8"]
PrecisionChoice: TypeAlias = Literal["auto", "float32", "autocast", "bfloat16", "fp8"]

HALF: Final = ("bfloat16", "fp8")  # those of which the weights are bfloat16
