"""What a run leaves behind, and how a person tells from it what happened."""
