"""Weights that come and go: our own sealed files, other people's formats, public weights by name."""
