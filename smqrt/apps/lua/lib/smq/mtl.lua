-- require "smq.mtl": links to other nodes, which all hubs of the process share, and channels of applications over them (spec: smq §6).
local core, py = ...

local arg, ref = core.arg, core.ref

local PING_S <const>, SILENCE_S <const> = 1, 5
local MAX_S <const> = 3600

-- key, value, key, value, ... as a table
local function table_of_pairs(...)
  local list, names = table.pack(...), {}
  for at = 1, list.n - 1, 2 do names[list[at]] = list[at + 1] end
  return names
end
core.table_of_pairs = table_of_pairs

-- ---- channels

local channel = {}
local channel_class = core.class("channel", channel)
local channels = setmetatable({}, {__mode = "k"}) -- object -> integer

local function channel_handle(self)
  local number = channels[self]
  if not number then core.raise("bad self (a channel made by mtl:open is expected; call its methods with ':')") end
  return number
end

channel_class.__gc = function(self)
  if channels[self] then py.forget(channels[self]) end
end

-- syntax: channel:send(data [,node])      -> number of nodes to which it was sent [,"full"] | nil, "full" | nil, "nobody"
function channel.send(self, data, node)
  local nodes, full = py.send(channel_handle(self), core.payload(data, 1, "send"), arg.optional(arg.integer, node, nil, 2, "send"))
  local word = full > 0 and "full" or nil
  if nodes > 0 then return nodes, word end
  return nil, word or "nobody"
end

-- syntax: channel:nodes()         -> {number of a node = the address of the link}
function channel.nodes(self) return table_of_pairs(py.channel_nodes(channel_handle(self))) end

-- syntax: channel:counts()        -> {sent = n, received = n, refused = n, lost = n, dropped = n}
function channel.counts(self) return table_of_pairs(py.counts(channel_handle(self))) end

-- syntax: channel:close([msg])    its callbacks are not called any more; data that was sent still arrives
function channel.close(self, msg) py.close_channel(channel_handle(self), arg.optional(arg.string, msg, "", 1, "close")) end

-- ---- links

local mtl = {}
local class = core.class("mtl", mtl)
local handles = setmetatable({}, {__mode = "k"}) -- object -> integer

local function handle(self)
  local number = handles[self]
  if not number then core.raise("bad self (links made by create are expected; call their methods with ':')") end
  return number
end

-- The integer of links, for smq.conn and smq.cluster; nil when `value` is not an mtl.
function core.mtl_handle(value) return handles[value] end

-- syntax: mtl:commence(sock [,function(ip, up, err)])     -> whether the socket is now a link
function mtl.commence(self, sock, status)
  core.socket.self_of(sock, "commence")
  status = arg.optional(arg["function"], status, nil, 2, "commence")
  return py.commence(handle(self), sock.handle, status and ref(status))
end

-- syntax: mtl:open(name, statusCB(node, up, err), dataCB(data, node))      -> channel
function mtl.open(self, name, status, data)
  name = arg.string(name, 1, "open")
  status, data = arg["function"](status, 2, "open"), arg["function"](data, 3, "open")
  local opened = setmetatable({}, channel_class)
  channels[opened] = py.open(handle(self), name, ref(status), ref(data))
  return opened
end

-- syntax: mtl:isopen(name)    -> whether there is an open channel, or a clustered hub of this process, of that name
function mtl.isopen(self, name) return py.isopen(handle(self), arg.string(name, 1, "isopen")) end

-- syntax: mtl:close(name [,msg])      -> whether there was a channel of that name, or else a clustered hub, which leaves its cluster
function mtl.close(self, name, msg)
  return py.close_named(handle(self), arg.string(name, 1, "close"), arg.optional(arg.string, msg, "", 2, "close"))
end

-- syntax: mtl:hascon(ip)      -> whether there is a link to a node at that address
function mtl.hascon(self, ip) return py.hascon(handle(self), arg.string(ip, 1, "hascon")) end

-- syntax: mtl:shutdown()      leaves all clusters, closes all channels, and closes all links
function mtl.shutdown(self) py.mtl_shutdown(handle(self)) end

local known = {keepalive = true, keepintv = true, onstatus = true, ping = true, log = true, node = true}
local known_ping = {timespan = true, timeout = true, roundtripCB = true}

local function warn_of_unknown(op, names, what)
  for key in pairs(op) do
    if not names[key] then tracep(false, 0, core.unknown_option(what, key, names)) end
  end
end

-- Seconds after which an idle node is pinged, and seconds without a packet after which its link is closed.
local function times(op, ping)
  if op.ping then
    local timespan = arg.number(ping.timespan or 8, "2.ping.timespan", "create")
    local timeout = arg.number(ping.timeout or 2, "2.ping.timeout", "create")
    if not (timeout >= 2 and timespan >= 4 * timeout and timespan + timeout <= MAX_S) then
      core.raise("bad argument #2.ping to 'create' (timeout is at least 2 s, timespan at least four times as long, both at most 3600 s)")
    end
    return timespan, timespan + timeout
  end
  if op.keepalive or op.keepintv then
    local keepintv = arg.number(op.keepintv or 2, "2.keepintv", "create")
    local keepalive = arg.number(op.keepalive or 20, "2.keepalive", "create")
    if not (keepintv >= 0.05 and keepalive > keepintv and keepalive <= MAX_S) then
      core.raise("bad argument #2.keepalive to 'create' (keepintv is at least 0.05 s, keepalive more than that and at most 3600 s)")
    end
    return keepintv, keepalive
  end
  return PING_S, SILENCE_S
end

local function callback(value, index)
  local f = arg.optional(arg["function"], value, nil, index, "create")
  return f and ref(f)
end

-- syntax: create(password [,{onstatus = f, ping = {timespan = s, timeout = s, roundtripCB = f}, log = f, node = number,
--   keepalive = 20, keepintv = 2}])       -> mtl
local function create(password, op)
  password = arg.string(password, 1, "create")
  op = arg.optional(arg.table, op, {}, 2, "create")
  local ping = arg.optional(arg.table, op.ping, {}, "2.ping", "create")
  warn_of_unknown(op, known, "smq.mtl")
  warn_of_unknown(ping, known_ping, "ping of smq.mtl")
  local ping_s, silence_s = times(op, ping)
  local node = arg.optional(arg.integer, op.node, 0, "2.node", "create")
  local onstatus, log = callback(op.onstatus, "2.onstatus"), callback(op.log, "2.log")
  local self = setmetatable({}, class)
  handles[self] = py.mtl(password, ping_s, silence_s, node, onstatus, callback(ping.roundtripCB, "2.ping.roundtripCB"), log)
  return self
end

-- syntax: server()    -> mtl: the links that the settings define, or those between the server's workers
local function server()
  local self = setmetatable({}, class)
  handles[self] = py.server()
  return self
end

return {create = create, server = server}
