-- socket.tcp: TCP objects of the LuaSocket layer, over the sockets of ba.socket (spec: bas-api §12, §17).
--
-- `sock` is the socket of ba.socket, nil before connect and listen. `inbox` has received data that is not read yet, `accepted` the
-- connections that socket.select has accepted.
local core = ...

local arg, concat, gsub, ipairs, max, min, running, sub = core.arg, table.concat, string.gsub, ipairs, math.max, math.min, coroutine.running, string.sub
local isyieldable, rawtype, remove, tointeger, tostring = core.isyieldable, core.rawtype, table.remove, math.tointeger, tostring

local layer, socket = core.luasocket, core.socket
local py, word_of = layer.py, layer.word

local MAX_RECEIVE_BYTES <const> = 16 << 20 -- of one call: the sender must not fill the memory
local CALLS_A_TURN <const> = 32            -- of receive; then other activities run
local CHUNK_BYTES <const> = 65536
local CONNECT_MS <const> = 20000           -- for a timeout of 0, with which applications of LuaSocket poll
local NO_LIMIT_MS <const> = 1e12
local MAX_NESTING <const> = 100            -- of tables that are sent

local tcp = {settimeout = layer.settimeout, gettimeout = layer.gettimeout}
local class = layer.class("tcp", tcp)

local function self_of(value, fname)
  return arg.instance(value, class, 1, fname)
end

local function handle_of(self)
  return self.sock and self.sock.handle
end

-- Returns nil and the error of a call without a connection.
local function unconnected(self)
  return nil, (self.sock or self.is_closed) and "closed" or "not connected"
end

local function adopt(sock)
  return layer.new(class, {sock = sock, kind = "client", inbox = layer.inbox()})
end

--- Returns a TCP object. sock: a socket of ba.socket that it uses, or nil.
-- family: "inet", "inet6" or nil for both.
local function new(sock, family)
  if sock ~= nil then return adopt(arg.instance(sock, socket.class, 1, "tcp")) end
  return layer.new(class, {kind = "master", inbox = layer.inbox(), accepted = {}, is_ipv6 = family == "inet6"})
end

layer.tcp = {new = new, class = class}

-- ---- connecting, listening

local function connect(self, host, port)
  local cosocket, timeout_ms = socket.owners[running()], layer.limit(self)()
  if timeout_ms == 0 then timeout_ms = CONNECT_MS end -- connecting blocks only this activity, so that polling is not needed
  local op = {timeout = timeout_ms or NO_LIMIT_MS, intf = self.local_host, ipv6 = self.is_ipv6 or nil}
  if not (cosocket and cosocket.handle) then return ba.socket.connect(host, port, op) end
  -- The cosocket has a connection, which ba.socket.connect would reject: this is a second one.
  return socket.made(socket.py.connect(host, port, op.timeout, op.intf, op.ipv6 == true, nil))
end

-- syntax: tcp:connect(host, port) -> 1 | nil, error       tcp:connect(socket): uses a connected socket of ba.socket
function tcp:connect(host, port)
  self_of(self, "connect")
  if self.is_closed then return nil, "closed" end
  if self.sock then return nil, "already connected" end
  if core.getmetatable(host) == socket.class then
    self.sock, self.kind = host, "client"
    return 1
  end
  local sock, word = connect(self, arg.string(host, 2, "connect"), layer.port(port, 3, "connect"))
  if not sock then return nil, word_of(word) end
  self.sock, self.kind = sock, "client"
  return 1
end

-- syntax: tcp:bind(host, port) -> 1       "*": every address of this machine
function tcp:bind(host, port)
  self_of(self, "bind")
  self.local_host, self.local_port = layer.address(host, 2, "bind"), layer.port(port, 3, "bind")
  return 1
end

-- syntax: tcp:listen([backlog]) -> 1 | nil, error
function tcp:listen()
  self_of(self, "listen")
  if self.is_closed then return nil, "closed" end
  if self.kind ~= "master" then return 1 end
  local sock, word = ba.socket.bind(self.local_port or 0, {intf = self.local_host, ipv6 = self.is_ipv6 or nil})
  if not sock then return nil, word_of(word) end
  self.sock, self.kind = sock, "server"
  return 1
end

-- syntax: tcp:accept() -> tcp | nil, error
function tcp:accept()
  self_of(self, "accept")
  if self.kind ~= "server" then return nil, "not listening" end
  local handle = handle_of(self)
  if not handle then return nil, "closed" end
  local ready = remove(self.accepted, 1)
  if ready then return adopt(ready) end
  local sock, word = socket.made(socket.py.read(handle, layer.limit(self)()))
  if not sock then return nil, word_of(word) end
  return adopt(sock)
end

-- ---- receiving

local function add(self, data)
  self.inbox:add(data)
  self.received = self.received + #data
end

-- Waits for data. Returns nil and an error when none comes or the inbox is full.
local function fill(self, limit)
  if self.inbox.size > MAX_RECEIVE_BYTES then return nil, "toomuchdata" end
  local data, word = self.sock:read(limit())
  if not data then return nil, word_of(word) end
  add(self, data)
  return true
end

local function failure(self, word, prefix)
  return nil, word, prefix .. self.inbox:take(self.inbox.size)
end

local function receive_line(self, limit, prefix)
  local state = {}
  while true do
    local count = self.inbox:line_bytes(state)
    if count then return prefix .. gsub(sub(self.inbox:take(count), 1, -2), "\r", "") end
    local ok, word = fill(self, limit)
    if not ok then return failure(self, word, prefix) end
  end
end

local function receive_count(self, limit, prefix, count)
  while self.inbox.size < count do
    local ok, word = fill(self, limit)
    if not ok then return failure(self, word, prefix) end
  end
  return prefix .. self.inbox:take(count)
end

local function receive_all(self, limit, prefix)
  local ok, word
  repeat ok, word = fill(self, limit) until not ok
  if word ~= "closed" or self.inbox.size + #prefix == 0 then return failure(self, word, prefix) end
  return prefix .. self.inbox:take(self.inbox.size)
end

-- Yields after some calls: a caller that always finds data must not block other activities.
local function yield_if_due(self)
  self.calls = (self.calls or 0) + 1
  if self.calls % CALLS_A_TURN == 0 and isyieldable() then core.pause() end
end

local PATTERNS <const> = {["*l"] = receive_line, l = receive_line, ["*a"] = receive_all, a = receive_all}

-- syntax: tcp:receive(["*l" | "*a" | bytes [, prefix]]) -> data | nil, error, partial data
-- "*l": a line without its end. "*a": all until the other side closes. The prefix counts towards the bytes.
function tcp:receive(pattern, prefix)
  self_of(self, "receive")
  prefix = arg.optional(arg.string, prefix, "", 3, "receive")
  if pattern == nil then pattern = "*l" end
  local receive = PATTERNS[pattern]
  local count = not receive and tointeger(tonumber(pattern))
  if not receive and (not count or count < 0) then core.raise("bad argument #2 to 'receive' (invalid receive pattern)") end
  if not handle_of(self) then
    local _, word = unconnected(self)
    return nil, word, prefix
  end
  yield_if_due(self)
  if receive then return receive(self, layer.limit(self), prefix) end
  return receive_count(self, layer.limit(self), prefix, count > #prefix and count - #prefix or 0)
end

--- Whether receive or accept would return at once, with a result or an error.
function layer.tcp.is_ready(self)
  local handle = handle_of(self)
  if not handle or self.inbox.size > 0 or self.accepted and self.accepted[1] then return true end
  local value, word = py.attempt(handle)
  if value == nil then return word ~= "timeout" end
  if self.kind == "server" then self.accepted[1] = socket.new(value) else add(self, value) end
  return true
end

-- ---- sending

local function send_piece(handle, data, limit)
  while true do
    local done, word = socket.py.put(handle, data, false)
    if word ~= "full" then
      if not done and done ~= false then return nil, word end
      return true
    end
    local room, why = socket.py.drain(handle, limit())
    if not room then return nil, why end
  end
end

-- Appends the strings and numbers of a table and of the tables in it to `parts`, and returns `parts`.
local function flatten(value, parts, depth)
  if depth > MAX_NESTING then core.raise("bad argument #1 to 'send' (nested too deeply)") end
  for _, one in ipairs(value) do
    if rawtype(one) == "table" then flatten(one, parts, depth + 1) else parts[#parts + 1] = arg.string(one, 2, "send") end
  end
  return parts
end

-- syntax: tcp:send(data [, i [, j]]) -> index of the last byte sent | nil, error, index
function tcp:send(data, i, j)
  self_of(self, "send")
  data = core.type(data) == "table" and concat(flatten(data, {}, 1)) or arg.string(data, 2, "send")
  i, j = arg.optional(arg.integer, i, 1, 3, "send"), arg.optional(arg.integer, j, -1, 4, "send")
  if i < 0 then i = max(#data + i + 1, 1) elseif i == 0 then i = 1 end
  if j < 0 then j = #data + j + 1 elseif j > #data then j = #data end
  local handle, limit = handle_of(self), layer.limit(self)
  if not handle then
    local _, word = unconnected(self)
    return nil, word, i - 1
  end
  for at = i, j, CHUNK_BYTES do
    local stop = min(at + CHUNK_BYTES - 1, j)
    local ok, word = send_piece(handle, sub(data, at, stop), limit)
    if not ok then return nil, word_of(word), at - 1 end
    self.sent = self.sent + stop - at + 1
  end
  return max(j, i - 1)
end

-- ---- the connection

-- syntax: tcp:close() -> 1
function tcp:close()
  self_of(self, "close")
  for _, ready in ipairs(self.accepted or {}) do ready:close() end
  self.inbox, self.is_closed = layer.inbox(), true
  if self.sock then self.sock:close() end
  return 1
end

local SHUTDOWN_MODES <const> = {both = 2, send = 1, receive = 0} -- of shutdown(2)

-- syntax: tcp:shutdown(["both" | "send" | "receive"]) -> 1 | nil, error       queued data is sent first
function tcp:shutdown(how)
  self_of(self, "shutdown")
  how = arg.optional(arg.string, how, "both", 2, "shutdown")
  if not SHUTDOWN_MODES[how] then core.bad_argument(2, "shutdown", '"both", "send" or "receive"', how) end
  if not handle_of(self) then return unconnected(self) end
  local ok, word = py.shutdown(self.sock.handle, SHUTDOWN_MODES[how])
  return ok and 1 or nil, word and word_of(word)
end

local function name_of(fname)
  return function(self)
    self_of(self, "get" .. fname)
    if not handle_of(self) then return unconnected(self) end
    local ip, port, isip6 = self.sock[fname](self.sock)
    if not ip then return nil, word_of(port) end
    return ip, port, isip6 and "inet6" or "inet"
  end
end

-- syntax: tcp:getpeername() -> ip, port, family | nil, error
tcp.getpeername, tcp.getsockname = name_of "peername", name_of "sockname"

local OPTIONS <const> = {keepalive = true, ["tcp-nodelay"] = true, reuseaddr = true, linger = true}

local function option_of(name, fname)
  name = arg.string(name, 2, fname)
  if not OPTIONS[name] then core.raise("bad argument #2 to '" .. fname .. "' (unsupported option '" .. name .. "')") end
  return name
end

-- syntax: tcp:setoption("keepalive" | "tcp-nodelay" | "reuseaddr", boolean) -> 1 | nil, error
-- syntax: tcp:setoption("linger", {on=boolean, timeout=seconds}) -> 1 | nil, error
function tcp:setoption(name, value)
  self_of(self, "setoption")
  name = option_of(name, "setoption")
  if name == "reuseaddr" then return 1 end -- always set for listeners
  if not handle_of(self) then return unconnected(self) end
  local ok, word
  if name == "linger" then
    value = arg.table(value, 3, "setoption")
    ok, word = py.set_linger(self.sock.handle, value.on == true, arg.optional(arg.size, value.timeout, 0, "timeout", "setoption"))
  else
    ok, word = self.sock:setoption(name, value ~= false)
  end
  return ok and 1 or nil, word and word_of(word)
end

-- syntax: tcp:getoption(name) -> value | nil, error
function tcp:getoption(name)
  self_of(self, "getoption")
  name = option_of(name, "getoption")
  if not handle_of(self) then return unconnected(self) end
  local value, timeout_s = py.option(self.sock.handle, name)
  if value == nil then return nil, word_of(timeout_s) end
  if name == "linger" then return {on = value, timeout = timeout_s} end
  return value
end

-- syntax: tcp:getstats() -> bytes received, bytes sent, age in seconds
function tcp:getstats()
  self_of(self, "getstats")
  return self.received, self.sent, (core.clock() - self.born_ms) / 1000
end

-- syntax: tcp:setstats(received, sent, age) -> 1
function tcp:setstats(received, sent, age)
  self_of(self, "setstats")
  self.received, self.sent = arg.optional(arg.number, received, self.received, 2, "setstats"), arg.optional(arg.number, sent, self.sent, 3, "setstats")
  if age ~= nil then self.born_ms = core.clock() - arg.number(age, 4, "setstats") * 1000 end
  return 1
end

-- syntax: tcp:dirty() -> whether there is unread data
function tcp:dirty()
  return self_of(self, "dirty").inbox.size > 0
end

-- The TLS methods of ba.socket.
-- syntax: tcp:upgrade(shark [, alpn]) -> true | nil, error      tcp:trusted([name]) -> true | nil, word
for _, name in ipairs{"upgrade", "trusted", "certificate", "cipher"} do
  tcp[name] = function(self, ...)
    self_of(self, name)
    if not self.sock then return nil, "invalidsocketcon" end
    return self.sock[name](self.sock, ...)
  end
end

function class.__tostring(self) return "tcp{" .. self.kind .. "}: " .. gsub(tostring(self.sock), "^.*: ", "") end

function class.__close(self) self:close() end
