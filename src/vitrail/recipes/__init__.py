"""Recipes: plain functions without arguments that return a run. `registry` lists and finds them.

The constants are the defaults of fine-tuning without a recipe; they are here so that help texts need no torch.
"""

from typing import Final

BATCH: Final = 512  # the paper's
EPOCHS: Final = 30
LEAST_STEPS: Final = 200
RATE: Final = 0.01  # in every grid of Table 4
DENSE_STEPS: Final = 2000  # at least, of queries
