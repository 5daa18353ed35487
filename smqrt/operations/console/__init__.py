"""The operator's web console: an application on the admin listener, live over SMQ (help: console)."""
