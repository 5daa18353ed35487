"""The Python halves of the Lua API, one file per namespace, each with `install(vm, services, ...)`; their Lua halves
lie in `lua/lib`."""
