"""One file a format: each gives the splits that lie at a path, or under a name."""
