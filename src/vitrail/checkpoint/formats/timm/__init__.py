"""timm's state dicts, with one module for each of timm's."""
