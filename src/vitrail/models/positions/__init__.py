"""Positions of tokens: embeddings that are added (D.4), rotary positions, and attention biases."""
