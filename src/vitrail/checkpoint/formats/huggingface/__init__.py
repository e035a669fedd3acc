"""Hugging Face folders: `config.json` with tensors, a row of data for each family."""
