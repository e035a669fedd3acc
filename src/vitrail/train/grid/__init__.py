"""One engine for grids of runs: the points of a sweep, the tasks of VTAB, the cells of a study."""
