"""The HTTP front: strict parsing, the virtual directory tree, static files."""
