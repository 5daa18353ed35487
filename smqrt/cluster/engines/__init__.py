"""Engines that join the hubs of several processes: links over TCP, TLS and Unix sockets."""
