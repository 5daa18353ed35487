"""The event loop: pooled greenlets, time slices, readiness of descriptors, and threads."""
