"""What all studies share: definition, grid, costs, results, figures, report."""
