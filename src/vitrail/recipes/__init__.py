"""Named runs: plain functions without arguments that return one. `registry` lists and finds them."""
