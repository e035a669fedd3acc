"""Checkpoints of a run: one format for one process or many, written beside the training and never half there."""
