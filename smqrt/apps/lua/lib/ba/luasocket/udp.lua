-- socket.udp: UDP objects of the LuaSocket layer, over the sockets of ba.socket (spec: bas-api §12, §17).
--
-- The socket is opened at its first use, and again when the remote address changes.
local core = ...

local arg, gsub, sub, tostring = core.arg, string.gsub, string.sub, tostring

local layer, socket = core.luasocket, core.socket
local word_of = layer.word

local MAX_DATAGRAM_BYTES <const> = 65535
local NO_LIMIT_MS <const> = 1e12

local udp = {settimeout = layer.settimeout, gettimeout = layer.gettimeout}
local class = layer.class("udp", udp)

local function self_of(value, fname)
  return arg.instance(value, class, 1, fname)
end

layer.udp = {class = class}

function layer.udp.new(family)
  return layer.new(class, {kind = "unconnected", is_ipv6 = family == "inet6"})
end

local function open(self, host, port)
  if self.sock then self.sock:close() end
  local sock, word = socket.made(socket.py.udp(host, port, self.local_port, self.local_host, self.is_ipv6 == true))
  self.sock = sock
  if not sock then return nil, word_of(word) end
  sock.is_udp = true
  return 1
end

-- Opens the socket unless it is open. Returns a true value, or nil and an error.
local function ensure_open(self)
  if self.is_closed then return nil, "closed" end
  if self.sock then return true end
  return open(self)
end

-- syntax: udp:setsockname(host, port) -> 1 | nil, error       the local address; "*": every address
function udp:setsockname(host, port)
  self_of(self, "setsockname")
  self.local_host, self.local_port = layer.address(host, 2, "setsockname"), layer.port(port, 3, "setsockname")
  if self.is_closed then return nil, "closed" end
  return open(self)
end

-- syntax: udp:setpeername(host, port) -> 1 | nil, error       the only remote address; "*": any
function udp:setpeername(host, port)
  self_of(self, "setpeername")
  host = layer.address(host, 2, "setpeername")
  port = host and layer.port(port, 3, "setpeername") or nil
  if self.is_closed then return nil, "closed" end
  local done, word = open(self, host, port)
  self.kind = done and host and "connected" or "unconnected"
  return done, word
end

local function send_result(done, word)
  if not done then return nil, word_of(word) end
  return 1
end

-- syntax: udp:send(data) -> 1 | nil, error       to the address of setpeername
function udp:send(data)
  self_of(self, "send")
  data = arg.string(data, 2, "send")
  if self.kind ~= "connected" then return nil, self.is_closed and "closed" or "not connected" end
  return send_result(self.sock:write(data))
end

-- syntax: udp:sendto(data, ip, port) -> 1 | nil, error
function udp:sendto(data, ip, port)
  self_of(self, "sendto")
  data, ip, port = arg.string(data, 2, "sendto"), arg.string(ip, 3, "sendto"), layer.port(port, 4, "sendto")
  if self.kind == "connected" then return nil, "already connected" end
  local ok, word = ensure_open(self)
  if not ok then return nil, word end
  return send_result(self.sock:sendto(data, ip, port))
end

local function receive(self, size)
  local waiting = self.waiting
  self.waiting = nil
  if waiting then return sub(waiting[1], 1, size), waiting[2], waiting[3] end
  local ok, word = ensure_open(self)
  if not ok then return nil, word end
  local data, ip, port = self.sock:read(layer.limit(self)() or NO_LIMIT_MS, true)
  if not data then return nil, word_of(ip) end
  return sub(data, 1, size), ip, port
end

local function size_of(size, fname)
  return arg.optional(arg.size, size, MAX_DATAGRAM_BYTES, 2, fname)
end

-- syntax: udp:receive([size]) -> data | nil, error
function udp:receive(size)
  local data, word = receive(self_of(self, "receive"), size_of(size, "receive"))
  if not data then return nil, word end
  return data
end

-- syntax: udp:receivefrom([size]) -> data, ip, port | nil, error
function udp:receivefrom(size)
  return receive(self_of(self, "receivefrom"), size_of(size, "receivefrom"))
end

--- Whether receive would return at once; keeps a datagram that has arrived.
function layer.udp.is_ready(self)
  if self.waiting or not ensure_open(self) then return true end
  local data, ip, port = layer.py.attempt(self.sock.handle)
  if data == nil then return ip ~= "timeout" end
  self.waiting = {data, ip, port}
  return true
end

-- syntax: udp:close() -> 1
function udp:close()
  self_of(self, "close")
  if self.sock then self.sock:close() end
  self.is_closed, self.kind = true, "unconnected"
  return 1
end

local function name_of(fname)
  return function(self)
    local ok, word = ensure_open(self_of(self, "get" .. fname))
    if not ok then return nil, word end
    local ip, port, isip6 = self.sock[fname](self.sock)
    if not ip then return nil, word_of(port) end
    return ip, port, isip6 and "inet6" or "inet"
  end
end

-- syntax: udp:getsockname() -> ip, port, family | nil, error
udp.getpeername, udp.getsockname = name_of "peername", name_of "sockname"

local OPTIONS <const> = {broadcast = true, dontroute = true}

-- syntax: udp:setoption("broadcast" | "dontroute", boolean) -> 1 | nil, error
-- syntax: udp:setoption("ip-add-membership" | "ip-drop-membership", {multiaddr=ip, interface=ip}) -> 1 | nil, error
function udp:setoption(name, value)
  self_of(self, "setoption")
  name = arg.string(name, 2, "setoption")
  local ok, word = ensure_open(self)
  if not ok then return nil, word end
  if name == "ip-add-membership" or name == "ip-drop-membership" then
    value = arg.table(value, 3, "setoption")
    local intf = arg.optional(arg.string, value.interface, "0.0.0.0", "interface", "setoption")
    local multiaddr = arg.string(value.multiaddr, "multiaddr", "setoption")
    return send_result(self.sock:setoption("ip-membership", name == "ip-add-membership", multiaddr, intf == "*" and "0.0.0.0" or intf))
  end
  if not OPTIONS[name] then core.raise("bad argument #2 to 'setoption' (unsupported option '" .. name .. "')") end
  return send_result(self.sock:setoption(name, value ~= false))
end

function class.__tostring(self) return "udp{" .. self.kind .. "}: " .. gsub(tostring(self.sock), "^.*: ", "") end

function class.__close(self) self:close() end
