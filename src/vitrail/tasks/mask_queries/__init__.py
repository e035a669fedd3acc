"""What semantic, instance and panoptic segmentation with queries share."""
