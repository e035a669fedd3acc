"""The options of every command, declared once. Nothing here imports torch, so help answers at once."""
