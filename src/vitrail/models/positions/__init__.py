"""Where tokens are: embeddings that are added (D.4), rotary positions, and biases of attention."""
