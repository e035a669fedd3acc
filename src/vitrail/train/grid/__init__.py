"""The engine that runs grids of training runs: the points of a sweep, the tasks of VTAB, the cells of a study."""
