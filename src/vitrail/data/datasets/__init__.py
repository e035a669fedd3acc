"""Data sets by name: where their files come from and how each is read."""
