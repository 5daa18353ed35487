"""Hot restart: a new process takes over sockets and sessions."""
