"""Feeds thousands of damaged images to the image reader and checks what happens.

    python bench/fuzz_images.py --files 3000 --seed 0

Reads ``--files`` damaged copies of each of some thirty kinds of file (every supported format, in every variant that has
its own decoder), in forked children with a memory limit and a watchdog. tests/data/decode/fuzzing.py does the work and
defines what counts as a failure. 3,000 copies of each, 93,000 in all, take about half a minute on one core.
"""

import os
import sys
from pathlib import Path

os.environ["OPENBLAS_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.data.decode.fuzzing import main

if __name__ == "__main__":
    sys.exit(main())
