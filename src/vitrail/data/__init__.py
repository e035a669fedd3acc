"""Pictures to tensors. Knows no model."""
