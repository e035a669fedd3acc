"""Formats of other libraries: one module each, with one table for both directions."""
