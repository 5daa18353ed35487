"""Web console for operators: an application on the admin listener, updated over SMQ (help: console)."""
