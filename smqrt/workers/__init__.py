"""The worker processes of one server: identity, calls between them, and shared rows."""
