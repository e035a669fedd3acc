"""Processes, and who holds what. The only place that asks torch.distributed anything."""
