"""SMQ over transports: handshake, data path, authentication of clients, and stores of names and values."""
