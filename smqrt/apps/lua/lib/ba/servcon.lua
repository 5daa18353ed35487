-- ba.create.servcon: more ports for the server (spec: bas-api §10). A port is open as long as its object exists.
local core, py = ...

local arg, setmetatable = core.arg, setmetatable

local methods = {}
local class = core.class("servcon", methods)

local function handle_of(self, fname)
  return arg.instance(self, class, 1, fname).handle
end

-- Returns the number of the port. `port` may be an open servcon, which is closed to release its port.
local function port_of(port)
  if core.type(port) ~= "userdata" then return arg.integer(port, 1, "servcon") end
  local handle = handle_of(port, "servcon")
  local number = py.port(handle)
  if not number then core.raise("bad argument #1 to 'servcon' (the port was closed)") end
  py.close(handle)
  return number
end

-- syntax: ba.create.servcon(port | old [, {shark, intf, ipv6}]) -> servcon | nil, error, reason
function ba.create.servcon(port, op)
  op = arg.optional(arg.table, op, {}, 2, "servcon")
  local tls = op.shark ~= nil and core.tls.check(op.shark, 2, "servcon", "server") or nil
  local intf = arg.optional(arg.string, op.intf, nil, 2, "servcon")
  local ipv6 = arg.optional(arg.boolean, op.ipv6, false, 2, "servcon")
  local handle, message, reason = py.open(port_of(port), tls, intf, ipv6)
  if not handle then return nil, message, reason end
  return setmetatable({handle = handle}, class)
end

-- syntax: servcon:port() -> number | nil when it is closed
function methods:port() return py.port(handle_of(self, "port")) end

-- syntax: servcon:close() -> whether it was open       connections stay open
function methods:close() return py.close(handle_of(self, "close")) end

class.__gc, class.__close = methods.close, methods.close
