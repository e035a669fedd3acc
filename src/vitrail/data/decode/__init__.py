"""Decodes image files to pixels."""
