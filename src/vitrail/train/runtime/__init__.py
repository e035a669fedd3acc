"""What a running training needs: its cost, its throughput, its observers, its messages."""
