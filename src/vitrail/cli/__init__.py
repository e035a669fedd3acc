"""The command line: parsing and printing, with one `run_...` function per command."""

from vitrail.cli.app import main

__all__ = ["main"]
