"""Public weights by name: which file it is, and how it comes from the hub into the cache."""
