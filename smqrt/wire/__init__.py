"""The formats on the wire: bytes in, values out. Standard library only."""
