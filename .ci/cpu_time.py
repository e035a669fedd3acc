"""Runs a command, then prints the CPU time that it and its children took.

    python .ci/cpu_time.py "make test" make lint types contracts fast

The first argument is the name to print; the exit status is the command's.
"""

import resource
import subprocess
import sys
import time


def main() -> int:
    name, *command = sys.argv[1:]
    start = time.monotonic()
    status = subprocess.run(command, check=False).returncode
    wall = time.monotonic() - start
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{name}: {usage.ru_utime + usage.ru_stime:.0f} s of CPU, {wall:.0f} s of wall time", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
