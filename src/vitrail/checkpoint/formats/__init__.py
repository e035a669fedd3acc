"""Other people's formats: one module each, one table for both directions."""
