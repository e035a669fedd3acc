"""Any source as tar shards: the road to large sets."""
