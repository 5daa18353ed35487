"""Applications, in Lua and in Python."""
