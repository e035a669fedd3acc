"""The command line: parsing and printing, one file a command."""

from vitrail.cli.app import main

__all__ = ["main"]
