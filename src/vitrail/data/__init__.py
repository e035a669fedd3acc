"""Images to tensors. Knows no model."""
