-- Version, addresses and ports of the server (spec: bas-api §7).
local core, py = ...

local arg = core.arg

--- ba.version(): returns the version of the interface, that of Lua, and the date of the build.
function ba.version() return py.version() end

--- ba.cmpaddr(a, b): whether both are the same IP address.
function ba.cmpaddr(a, b)
  return py.cmpaddr(arg.string(a, 1, "cmpaddr"), arg.string(b, 2, "cmpaddr"))
end

--- ba.serverport, ba.serversslport: the ports of the server; nil without one, and before the server listens.
setmetatable(ba, {__index = function(_, name)
  if name == "serverport" or name == "serversslport" then return py.port(name == "serversslport") end
end})
