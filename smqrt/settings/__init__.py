"""Settings of the server: declarations, sources and limits."""
