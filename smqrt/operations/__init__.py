"""Operations: health, metrics, logs, and an API on the admin listener (help: metrics)."""
