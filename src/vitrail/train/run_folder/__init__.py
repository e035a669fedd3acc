"""The folder of a run: its files, its log, its description."""
