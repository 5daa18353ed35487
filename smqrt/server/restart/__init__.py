"""Hot restart: a new process takes the place of this one, with its sockets and the sessions of its clients."""
