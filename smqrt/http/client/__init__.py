"""HTTP client for code in greenlets: one request at a time, with streamed bodies."""
