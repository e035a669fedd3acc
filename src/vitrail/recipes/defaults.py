"""What fine-tuning chooses where nothing is said; apart from `finetune.py`, so that help can name it without torch."""

from typing import Final

BATCH: Final = 512  # the paper's
EPOCHS: Final = 30
LEAST_STEPS: Final = 200
RATE: Final = 0.01  # in every grid of Table 4
