"""What people train networks for: one folder per task, and the one interface that the rest of the package knows."""
