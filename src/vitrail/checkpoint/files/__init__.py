"""Bytes on disk to plain tensors and back: our own sealed files, and foreign ones that may be damaged or hostile."""
