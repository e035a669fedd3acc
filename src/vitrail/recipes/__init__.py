"""Named runs: plain functions without arguments that return one. `registry` lists and finds them.

The constants are the defaults of fine-tuning without a recipe, which help texts name without torch.
"""

from typing import Final

BATCH: Final = 512  # the paper's
EPOCHS: Final = 30
LEAST_STEPS: Final = 200
RATE: Final = 0.01  # in every grid of Table 4
DENSE_STEPS: Final = 2000  # at least, of queries
