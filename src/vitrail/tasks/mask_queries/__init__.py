"""Shared parts of semantic, instance and panoptic segmentation with queries."""
