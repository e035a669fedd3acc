"""The one loop, its step, and the folder that a run leaves."""
