"""Applications in Python."""
