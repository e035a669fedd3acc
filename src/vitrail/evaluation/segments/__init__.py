"""Scores of masks, from arrays alone: panoptic quality, average precision of masks, boundary IoU."""
