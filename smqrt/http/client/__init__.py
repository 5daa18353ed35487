"""An HTTP client for code in greenlets: one conversation at a time, bodies streamed both ways."""
