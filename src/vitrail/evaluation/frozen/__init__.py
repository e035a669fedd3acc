"""What frozen features are worth: few-shot, ridge, probes, nearest neighbours, embeddings."""
