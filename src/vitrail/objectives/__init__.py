"""Training objectives. An objective is a module that owns its network and heads; the loop does not know which it is."""
