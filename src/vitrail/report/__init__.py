"""Figures and self-contained pages from arrays and tables, independent of models and data."""
