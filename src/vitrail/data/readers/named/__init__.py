"""Data sets by name: the paper's, VTAB's and a few small ones, read from the files that their authors gave out."""
