-- require "smq.mtl": links to other nodes, which the hubs of this process share (specification: smq.md 6).
local core, py = ...

local arg, ref = core.arg, core.ref

local PING_S <const>, SILENCE_S <const> = 1, 5

local mtl = {}
local class = core.class("mtl", mtl)
local handles = setmetatable({}, {__mode = "k"}) -- object -> integer

local function handle(self)
  local number = handles[self]
  if not number then core.raise("bad self (links made by create are expected; call their methods with ':')") end
  return number
end

-- The integer of links, for smq.conn and smq.cluster; nil for something else.
function core.mtl_handle(value) return handles[value] end

-- syntax: mtl:commence(sock [,function(ip, up, err)])     -> whether the socket is a link now
function mtl.commence(self, sock, status)
  core.socket.self_of(sock, "commence")
  status = arg.optional(arg["function"], status, nil, 2, "commence")
  return py.commence(handle(self), sock.handle, status and ref(status))
end

-- syntax: mtl:isopen(name)    -> whether a hub of this process is in that cluster
function mtl.isopen(self, name) return py.isopen(handle(self), arg.string(name, 1, "isopen")) end

-- syntax: mtl:close(name [,msg])      -> whether there was a hub in that cluster; it goes on alone
function mtl.close(self, name, msg)
  return py.leave(handle(self), arg.string(name, 1, "close"), arg.optional(arg.string, msg, "", 2, "close"))
end

-- syntax: mtl:hascon(ip)      -> whether there is a link to a node at that address
function mtl.hascon(self, ip) return py.hascon(handle(self), arg.string(ip, 1, "hascon")) end

-- syntax: mtl:shutdown()      -> all clusters are left, and all links end
function mtl.shutdown(self) py.mtl_shutdown(handle(self)) end

local known = {keepalive = true, keepintv = true, onstatus = true, ping = true, log = true, node = true}

-- After so many seconds a node is asked whether it is there, and after so many without a word it is lost.
local function times(op)
  if op.ping then
    local ping = arg.table(op.ping, "2.ping", "create")
    local timespan = arg.number(ping.timespan or 8, "2.ping.timespan", "create")
    local timeout = arg.number(ping.timeout or 2, "2.ping.timeout", "create")
    if timeout < 2 or timespan < 4 * timeout then
      core.raise("bad argument #2.ping to 'create' (timeout is 2 s at least, and timespan four times as long)")
    end
    return timespan, timespan + timeout
  end
  if op.keepalive or op.keepintv then
    return arg.number(op.keepintv or 2, "2.keepintv", "create"), arg.number(op.keepalive or 20, "2.keepalive", "create")
  end
  return PING_S, SILENCE_S
end

-- syntax: create(password [,{keepalive = 20, keepintv = 2, onstatus = f, ping = {timespan, timeout}, node = number}])
local function create(password, op)
  password = arg.string(password, 1, "create")
  op = arg.optional(arg.table, op, {}, 2, "create")
  for key in pairs(op) do
    if not known[key] then tracep(false, 0, core.where() .. "smq.mtl has no option '" .. tostring(key) .. "': it means nothing") end
  end
  local onstatus = arg.optional(arg["function"], op.onstatus, nil, "2.onstatus", "create")
  local ping_s, silence_s = times(op)
  local self = setmetatable({}, class)
  local node = arg.optional(arg.integer, op.node, 0, "2.node", "create")
  handles[self] = py.mtl(password, ping_s, silence_s, node, onstatus and ref(onstatus))
  return self
end

return {create = create}
