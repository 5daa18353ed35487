"""Engines that carry links: TCP, TLS and Unix sockets, and NATS."""
