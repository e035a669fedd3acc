"""Reads and writes files of plain tensors: our own sealed files, and foreign ones, which may be damaged or hostile."""
