"""Reads and writes weights: our own sealed files, the formats of other libraries, public weights by name."""
