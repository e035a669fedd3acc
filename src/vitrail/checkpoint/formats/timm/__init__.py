"""timm's state dicts, a module for each of its own."""
