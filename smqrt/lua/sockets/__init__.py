"""What stands behind a socket object of Lua."""
