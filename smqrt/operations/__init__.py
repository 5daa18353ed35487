"""The operators' side of a running server: health, metrics, and an API on a listener of its own (help: metrics)."""
