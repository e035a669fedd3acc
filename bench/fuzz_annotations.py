"""Feeds thousands of damaged annotations to the readers of COCO, panoptic, YOLO and VOC sets and checks what happens.

    python bench/fuzz_annotations.py --files 3000 --seed 0

Reads ``--files`` damaged copies of each of ten kinds of file, in forked children with a memory limit and a watchdog.
tests/data/readers/annotation_fuzzing.py does the work and defines what counts as a failure.
"""

import os
import sys
from pathlib import Path

os.environ["OPENBLAS_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.data.readers.annotation_fuzzing import main

if __name__ == "__main__":
    sys.exit(main())
