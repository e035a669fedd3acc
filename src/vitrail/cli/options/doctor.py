"""Say what is here: versions, devices, threads, extras, caches and the weights that come along, and what is missing.

Ends with one line: all is well, or what to do first. Exit status 1: something that vitrail needs is broken. For a bug
report give --json; secrets and the name of your home folder are left out."""

import argparse
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorOptions:
    """The options of `vitrail doctor`."""

    json: bool = False


OPTIONS = DoctorOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="everything as one JSON object, for a bug report")
