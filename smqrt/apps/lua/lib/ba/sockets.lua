-- The socket object: reading, writing, closing, and properties of the connection (spec: bas-api §8.2).
--
-- `handle` is the number of the socket in Python, nil without a connection. `runner` is the coroutine of the cosocket that the
-- socket belongs to, nil in blocking mode. `mode` is "r" or "s" for a cosocket.
local core, py = ...

local arg, describe, is_bytearray, raise, running, setmetatable, sub, tostring =
  core.arg, core.certificate, core.is_bytearray, core.raise, coroutine.running, setmetatable, string.sub, tostring
local ipairs, isyieldable, rawtype, select, unpack = ipairs, core.isyieldable, core.rawtype, select, table.unpack

local methods = {}
local class = core.class("socket", methods)
local owners = setmetatable({}, {__mode = "k"}) -- coroutine -> the socket whose cosocket runs in it
local last_number = 0

local socket = {class = class, methods = methods, owners = owners, py = py}
core.socket = socket

--- Returns a socket object; `handle` is nil for one without a connection.
function socket.new(handle)
  last_number = last_number + 1
  return setmetatable({handle = handle, number = last_number}, class)
end

--- The same for results of Python: a handle, or nil and an error.
function socket.made(handle, ...)
  if not handle then return nil, ... end
  return socket.new(handle), ...
end

local function self_of(value, fname)
  return arg.instance(value, class, 1, fname)
end
socket.self_of = self_of

-- ---- reading

-- A cosocket without a connection can only wait: for the time, or until it is closed.
local function wait(self, ms)
  if self.closed or not ms then return nil, self.closed and "socketclosed" or "invalidsocketcon" end
  return py.suspend(self.number, ms)
end

local function without_address(data, ...)
  if data == nil then return nil, ... end
  return data
end

-- syntax: socket:read([ms]) -> data | nil, error         a stream
-- syntax: socket:read([ms]) -> data, istext [, bytesread, framelen] | nil, error [, closecode]    a WebSocket
-- syntax: socket:read([ms,] true) -> data, ip, port, isipv6 | nil, error        UDP; without true only the data
function methods:read(ms, with_address)
  self_of(self, "read")
  if ms == true then ms, with_address = nil, true end
  if ms then ms = arg.milliseconds(ms, 1, "read") end
  if self.runner and self.runner ~= running() then raise("read: the socket belongs to a cosocket; only that cosocket may read it") end
  if not self.handle then return wait(self, ms) end
  if self.is_udp and with_address ~= true then return without_address(py.read(self.handle, ms)) end
  return py.read(self.handle, ms)
end

-- syntax: listener:accept() -> socket | nil, error
function methods:accept()
  self_of(self, "accept")
  if self.runner and self.runner ~= running() then raise("accept: the listener belongs to a cosocket; only that cosocket may accept") end
  if not self.is_listener then return nil, self.closed and "socketclosed" or "incorrectuse" end
  return socket.made(py.read(self.handle, nil))
end

-- ---- writing

local function octets(data, i, j)
  local kind = rawtype(data)
  if kind == "number" then
    data = tostring(data)
  elseif kind ~= "string" then
    if not is_bytearray(data) then core.bad_argument(1, "write", "string", data) end
    data = tostring(data)
  end
  if not i then return data end
  return sub(data, arg.integer(i, 2, "write"), j and arg.integer(j, 3, "write"))
end

-- Whether a writer waits for room in the queue: in any cosocket, and elsewhere unless the socket is in mode "s".
local function may_wait(self)
  return self.mode ~= "s" or owners[running()]
end

-- syntax: socket:write(data [,i [,j [,text]]]) -> true | nil, error | nil, queuelen
-- syntax: socket:write(data, text)
function methods:write(data, i, j, text)
  self_of(self, "write")
  if i == true or i == false then i, text = nil, i end
  if rawtype(data) ~= "string" or i then data = octets(data, i, j) end
  local handle = self.handle
  if not handle then return nil, self.closed and "socketclosed" or "invalidsocketcon" end
  if not may_wait(self) then return py.offer(handle, data, text == true) end
  local done, word = py.put(handle, data, text == true)
  while word == "full" do
    local room, why = py.drain(handle)
    if not room then return nil, why end
    done, word = py.put(handle, data, text == true)
  end
  if done == false or word == "turn" and isyieldable() then return py.drain(handle) end
  if done then return true end
  return nil, word
end

-- syntax: udp:sendto(data, ip, port) -> true | nil, error
function methods:sendto(data, ip, port)
  self_of(self, "sendto")
  if not self.handle then return nil, "socketclosed" end
  return py.sendto(self.handle, octets(data), arg.string(ip, 2, "sendto"), arg.integer(port, 3, "sendto"))
end

-- syntax: websocket:ping([data]) -> true | nil, error
function methods:ping(data)
  self_of(self, "ping")
  if not self.handle then return nil, "socketclosed" end
  return py.ping(self.handle, data and octets(data) or "")
end

-- ---- closing

-- syntax: socket:close() -> true | false when it was closed before
-- syntax: websocket:close([code [,text]])
function methods:close(code, text)
  self_of(self, "close")
  if self.closed then return false end
  local handle = self.handle
  self.closed, self.handle = true, nil
  py.wake(self.number, "socketclosed")
  if handle then py.close(handle, arg.optional(arg.integer, code, nil, 1, "close"), text and octets(text) or "") end
  return true
end

--- Marks the socket as closed after the remote side or an error has closed the connection.
function socket.forget(self)
  if self.handle then py.drop(self.handle) end
  self.handle, self.closed = nil, true
end

class.__close = function(self) self:close() end
class.__gc = function(self)
  if self.handle then py.close(self.handle) end
end
class.__tostring = function(self) return "socket: " .. self.number end

-- ---- properties and options

-- Adds a method that needs a connection, to whose handle f is applied.
local function add_method(name, f)
  methods[name] = function(self, ...)
    self_of(self, name)
    if not self.handle then return nil, self.closed and "socketclosed" or "invalidsocketcon" end
    return f(self.handle, ...)
  end
end

-- syntax: socket:peername() -> ip, port, isipv6 | nil, error
add_method("peername", function(handle) return py.peername(handle) end)
add_method("sockname", function(handle) return py.sockname(handle) end)

-- syntax: socket:setoption(name, on, ...) -> true | nil, error
add_method("setoption", function(handle, name, on, ...)
  local values, count = {...}, select("#", ...)
  for i = 1, count do
    local kind = rawtype(values[i])
    if kind ~= "number" and kind ~= "string" then core.bad_argument(i + 2, "setoption", "number or string", values[i]) end
    values[i] = tonumber(values[i]) or values[i] -- values may be numbers or addresses
  end
  return py.setoption(handle, arg.string(name, 1, "setoption"), arg.boolean(on, 2, "setoption"), unpack(values, 1, count))
end)

-- syntax: socket:queuelen([limit]) -> bytes that wait to be sent
add_method("queuelen", function(handle, limit) return py.queuelen(handle, arg.optional(arg.positive, limit, nil, 1, "queuelen")) end)

-- syntax: websocket:maxsize(bytes) -> true        the largest message that is accepted
add_method("maxsize", function(handle, size) return py.maxsize(handle, arg.positive(size, 1, "maxsize")) end)

-- syntax: socket:websocket() -> boolean
function methods:websocket()
  local handle = self_of(self, "websocket").handle
  return handle ~= nil and py.is_websocket(handle)
end

-- syntax: socket:owner() -> whether the caller is the cosocket of this socket
function methods:owner()
  return self_of(self, "owner").runner == running()
end

-- syntax: socket:state() -> "connected" | "listening" | "udp" | "notconnected" | "closed", whether it is connected
function methods:state()
  local handle = self_of(self, "state").handle
  if handle then return py.state(handle) end
  return self.closed and "closed" or "notconnected", false
end

-- ---- TLS

--- Returns the ALPN protocols of a string or a table of strings.
function socket.protocols(alpn, fname)
  if alpn == nil then return end
  if core.type(alpn) ~= "table" then return arg.string(alpn, "alpn", fname) end
  local words = {}
  for i, word in ipairs(alpn) do words[i] = arg.string(word, "alpn", fname) end
  return unpack(words)
end

-- syntax: socket:upgrade(tls [,alpn]) -> true | nil, error [, reason]
function methods:upgrade(tls, alpn)
  self_of(self, "upgrade")
  if self.runner and self.runner ~= running() then raise("upgrade: the socket belongs to a cosocket; only that cosocket may upgrade it") end
  local number = core.tls.check(tls, 1, "upgrade")
  if not self.handle then return nil, self.closed and "socketclosed" or "invalidsocketcon" end
  return py.upgrade(self.handle, number, socket.protocols(alpn, "upgrade"))
end

-- syntax: socket:trusted([name]) -> true | nil, "cn" | "cert" | "certcn" | "none"
add_method("trusted", function(handle, name) return py.trusted(handle, arg.optional(arg.string, name, nil, 1, "trusted")) end)

-- syntax: socket:certificate() -> table | nil, error
add_method("certificate", function(handle)
  local text, word = py.certificate(handle)
  return describe(text), word
end)

-- syntax: socket:cipher() -> cipher, protocol | nil, error
add_method("cipher", function(handle) return py.cipher(handle) end)

-- syntax: socket:alpn() -> protocol | nil
add_method("alpn", function(handle) return py.alpn(handle) end)

-- syntax: socket:isresumed() -> boolean
add_method("isresumed", function(handle) return py.is_resumed(handle) end)
