"""What is minimised. An objective is a module that owns its network and heads; the loop is blind to which it is."""
