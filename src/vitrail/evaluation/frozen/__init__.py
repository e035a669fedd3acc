"""Evaluation of frozen features: few-shot, ridge regression, linear probes, nearest neighbours, embeddings."""
