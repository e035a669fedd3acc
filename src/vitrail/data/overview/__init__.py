"""What a collection holds, for a person to read."""
