"""`vitrail serve`, which from its first request on may not write a byte to a file: a limit that the system holds."""

import resource
import sys
from typing import Any

from vitrail.cli import serve
from vitrail.cli.app import main

announce = serve.announce


def limited(*args: Any) -> None:
    announce(*args)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


if __name__ == "__main__":
    serve.announce = limited
    sys.exit(main(["serve", *sys.argv[1:]]))
