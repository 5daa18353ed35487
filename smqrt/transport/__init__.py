"""Sockets: listeners, admission, streams, TLS, UDP and proxies."""
