"""The training loop, its step, and the folder that a run writes."""
