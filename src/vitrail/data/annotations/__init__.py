"""Annotations of parts of images: segments, boxes, and the run-length encoding of masks."""
