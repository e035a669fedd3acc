"""What evaluation may be asked for and what it does unless told otherwise; the options of the commands read it, too."""

from typing import Final, Literal, TypeAlias

# float32 throughout; float32 weights under bfloat16 autocast; or weights that are bfloat16 themselves.
Precision: TypeAlias = Literal["float32", "autocast", "bfloat16"]
Stored: TypeAlias = Literal["float32", "float16"]  # types of the numbers in a file of features

SHARE: Final = 0.1  # of every class that is held out, as the paper does on small sets (4.1)
TEMPERATURE: Final = 0.07  # of the votes of nearest neighbours
ITERATIONS: Final = 1000  # of L-BFGS at most
