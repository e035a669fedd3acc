"""Hugging Face folders: `config.json` with tensors, described by one row of data for each family."""
