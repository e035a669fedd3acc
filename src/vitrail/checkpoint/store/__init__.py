"""Checkpoints of a run: one format for any number of processes, written in the background, complete or absent."""
