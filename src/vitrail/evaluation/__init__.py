"""Evaluation of networks: accuracy, frozen features, few-shot. The constants here can be imported without torch."""

from typing import Final, Literal, TypeAlias

Stored: TypeAlias = Literal["float32", "float16"]  # types of the numbers in a file of features

SHARE: Final = 0.1  # share of every class that is held out, as in the paper for small sets (4.1)
TEMPERATURE: Final = 0.07  # of the votes of nearest neighbours
ITERATIONS: Final = 1000  # limit for L-BFGS
