"""Sends thousands of hostile requests to `vitrail serve` and checks what happens.

    python bench/fuzz_server.py --uploads 1000 --seed 0

A thousand damaged images, half as many damaged forms and JSON bodies, decompression bombs, bodies of 100 MB, wrong
lengths, slow senders, a thousand parts, path tricks, wrong types. tests/serve/fuzzing.py does the work and defines what
counts as a failure. Takes about a minute on one core.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.serve.fuzzing import main

if __name__ == "__main__":
    sys.exit(main())
