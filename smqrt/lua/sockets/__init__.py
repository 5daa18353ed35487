"""The sockets behind the socket objects of Lua."""
