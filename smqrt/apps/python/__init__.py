"""Python applications."""
