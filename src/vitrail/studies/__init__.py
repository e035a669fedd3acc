"""Studies: recipes and measurements over a grid, as the paper's tables and figures have them."""
