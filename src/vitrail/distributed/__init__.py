"""Process groups and sharding; the only place that calls torch.distributed."""
