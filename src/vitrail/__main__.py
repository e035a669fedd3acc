"""`python -m vitrail` is the `vitrail` command."""

import sys

from vitrail.cli import main

if __name__ == "__main__":
    sys.exit(main())
