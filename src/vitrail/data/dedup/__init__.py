"""Images of one set that are in another as well: exactly, nearly, mirrored, or as an embedding sees it."""
