"""A server process: settings, listeners, workers, reload and shutdown."""
