"""Wire formats without I/O, with the standard library only."""
