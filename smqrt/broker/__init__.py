"""The broker: pure state. It knows neither sockets nor greenlets nor Lua, and asks for time and randomness."""
