"""Child processes: on pseudo terminals, and shell commands."""
