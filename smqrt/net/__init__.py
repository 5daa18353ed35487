"""Sockets under gevent: listeners, TLS, pooled greenlets and the data path of connected peers."""
