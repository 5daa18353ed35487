"""The operating-system process: its start, its folders, its signals and its children."""
