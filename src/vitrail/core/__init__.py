"""The foundation of the package: errors, the shape legend, printing. Imports neither torch nor the rest of vitrail."""
