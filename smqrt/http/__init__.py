"""HTTP server: strict parsing, virtual directory tree, static files."""
