"""Broker state without I/O.

No module here uses sockets, greenlets or Lua. The clock and the source of random numbers are passed in.
"""
