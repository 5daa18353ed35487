"""Child processes: on a pseudo terminal, and commands of the shell."""
