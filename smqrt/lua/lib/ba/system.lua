-- System: version, addresses and clock of the server (spec: bas-api §7).
local core, py = ...

local arg = core.arg

--- ba.version(): version of the interface, of Lua, and the date of the build.
ba.version = py.version

--- ba.cmpaddr(a, b): whether both are the same IP address.
function ba.cmpaddr(a, b)
  return py.cmpaddr(arg.string(a, 1, "cmpaddr"), arg.string(b, 2, "cmpaddr"))
end
