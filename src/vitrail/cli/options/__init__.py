"""The options of every command. Nothing here waits for torch: help and a misspelt option answer at once."""
