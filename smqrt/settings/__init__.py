"""Settings: the table of all of them, the declaration of one, and where values come from."""
