"""Figures and self-contained pages from arrays and tables. Knows neither models nor data."""
