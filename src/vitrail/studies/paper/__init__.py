"""One module per study of the paper."""
