"""The networks of the paper: configs and names (no torch), modules, and their closed-form costs."""
