"""Damage images by the thousand and see what the reader makes of them.

    python bench/fuzz_images.py --files 3000 --seed 0

``--files`` damaged copies of each of some thirty kinds of file (every format on the list, in every variety that has a
decoder of its own) are read in forked children under a memory limit and a watchdog: tests/data/fuzzing.py, which says
what counts as a failure. 3,000 copies of each, 93,000 in all, take about half a minute on one core.
"""

import os
import sys
from pathlib import Path

os.environ["OPENBLAS_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.data.decode.fuzzing import main

if __name__ == "__main__":
    sys.exit(main())
