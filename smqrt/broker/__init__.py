"""Broker state without I/O: no sockets, greenlets or Lua; the clock and random numbers are passed in."""
