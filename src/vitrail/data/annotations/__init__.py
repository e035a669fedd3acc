"""Segments, bounding boxes, and the run-length encoding of masks."""
