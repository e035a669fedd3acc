"""Checkpoints of a run: one format for one process or many, written next to the training and never half there."""
