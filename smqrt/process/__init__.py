"""This operating-system process: start folder, current application, early signals, and child processes."""
