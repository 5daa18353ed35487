-- The module and global `socket`: functions of LuaSocket on ba.socket (spec: bas-api §12, §17).
local core, py = ...

local arg, concat, error, ipairs, pack, pcall = core.arg, table.concat, error, ipairs, string.pack, pcall
local min, rawtype, select, setmetatable = math.min, core.rawtype, select, setmetatable

local layer = core.luasocket
local tcp, udp = layer.tcp, layer.udp
local word_of = layer.word

local MAX_SELECT <const> = 1024
local BLOCKSIZE <const> = 2048

local socket = {_VERSION = "LuaSocket 3.0", _SETSIZE = MAX_SELECT, BLOCKSIZE = BLOCKSIZE, dns = {}}

-- ---- objects

-- syntax: socket.tcp() -> tcp       socket.tcp(sock): an object for a socket of ba.socket
function socket.tcp(sock) return tcp.new(sock) end
function socket.tcp4() return tcp.new(nil, "inet") end
function socket.tcp6() return tcp.new(nil, "inet6") end

-- syntax: socket.udp() -> udp
function socket.udp() return udp.new() end
socket.udp4 = socket.udp
function socket.udp6() return udp.new("inet6") end

local function connect(family, host, port, local_host, local_port)
  local self = tcp.new(nil, family)
  if local_host then self:bind(local_host, local_port or 0) end
  local done, word = self:connect(host, port)
  if not done then return nil, word end
  return self
end

-- syntax: socket.connect(host, port [, local host, local port [, family]]) -> tcp | nil, error
function socket.connect(host, port, local_host, local_port, family)
  return connect(family, host, port, local_host, local_port)
end

function socket.connect4(...) return connect("inet", ...) end
function socket.connect6(...) return connect("inet6", ...) end

-- syntax: socket.bind(host, port [, backlog]) -> tcp that listens | nil, error
function socket.bind(host, port, backlog)
  local self = tcp.new()
  self:bind(host, port)
  local done, word = self:listen(backlog)
  if not done then return nil, word end
  return self
end

-- ---- select

local KINDS <const> = {[tcp.class] = tcp, [udp.class] = udp}

local function checked(list, index)
  list = arg.optional(arg.table, list, {}, index, "select")
  for _, one in ipairs(list) do
    if not KINDS[core.getmetatable(one)] then core.bad_argument(index, "select", "sockets", one) end
  end
  if #list > MAX_SELECT then core.raise("bad argument #" .. index .. " to 'select' (at most " .. MAX_SELECT .. " sockets)") end
  return list
end

local function is_readable(one) return KINDS[core.getmetatable(one)].is_ready(one) end

local function is_writable(one)
  local handle = one.sock and one.sock.handle
  return not handle or core.getmetatable(one) == udp.class or py.has_room(handle)
end

-- The sockets that pass a test, by number; and their numbers, by socket.
local function selected(list, test)
  local result = {}
  for _, one in ipairs(list) do
    if test(one) then
      result[#result + 1] = one
      result[one] = #result
    end
  end
  return result
end

local function handles(list)
  local parts = {}
  for at, one in ipairs(list) do parts[at] = pack(">I8", one.sock.handle) end
  return concat(parts)
end

-- syntax: socket.select(readers, writers [, seconds]) -> readable sockets, writable sockets [, "timeout"]
-- Both results contain the objects by number, and the numbers by object.
function socket.select(readers, writers, seconds)
  readers, writers = checked(readers, 1), checked(writers, 2)
  seconds = arg.optional(arg.number, seconds, -1, 3, "select")
  local end_ms = seconds >= 0 and core.clock() + arg.milliseconds(seconds * 1000, 3, "select") or nil
  while true do
    local readable, writable = selected(readers, is_readable), selected(writers, is_writable)
    if readable[1] or writable[1] then return readable, writable end
    local left_ms = end_ms and end_ms - core.clock()
    if left_ms and left_ms <= 0 then return readable, writable, "timeout" end
    py.await_any(handles(readers), handles(writers), left_ms)
  end
end

-- ---- time, names

-- syntax: socket.sleep(seconds)
function socket.sleep(seconds) core.sleep(arg.milliseconds(arg.number(seconds, 1, "sleep") * 1000, 1, "sleep")) end

-- syntax: socket.gettime() -> seconds since 1970, with a fraction
function socket.gettime() return py.gettime() end

local function list_of(text)
  local list = {}
  for word in (text or ""):gmatch"%S+" do list[#list + 1] = word end
  return list
end

local function host_info(name, aliases, addresses)
  return {name = name, alias = list_of(aliases), ip = list_of(addresses)}
end

-- syntax: socket.dns.toip(name) -> ip, {name=, alias={}, ip={}} | nil, error
function socket.dns.toip(name)
  local full, aliases, addresses = py.toip(arg.plain(name, 1, "toip"))
  if not full then return nil, word_of(aliases) end
  local info = host_info(full, aliases, addresses)
  return info.ip[1], info
end

-- syntax: socket.dns.tohostname(ip) -> name, {name=, alias={}, ip={}} | nil, error
function socket.dns.tohostname(ip)
  local full, aliases, addresses = py.tohostname(arg.plain(ip, 1, "tohostname"))
  if not full then return nil, word_of(aliases) end
  return full, host_info(full, aliases, addresses)
end

-- syntax: socket.dns.getaddrinfo(name) -> array of {family="inet" | "inet6", addr=ip} | nil, error
function socket.dns.getaddrinfo(name)
  local addresses, word = py.addresses(arg.string(name, 1, "getaddrinfo"))
  if not addresses then return nil, word_of(word) end
  local list = list_of(addresses)
  for at, ip in ipairs(list) do list[at] = {family = ip:find(":", 1, true) and "inet6" or "inet", addr = ip} end
  return list
end

-- syntax: socket.dns.gethostname() -> name of this machine
function socket.dns.gethostname() return py.gethostname() end

-- ---- errors that `protect` catches

local Failure = {__tostring = function(failure) return core.describe(failure[1]) end}

-- syntax: socket.newtry(finalizer) -> try       try(...) returns its arguments; when the first is nil or false, it calls the finalizer
-- and raises the second as an error
function socket.newtry(finalizer)
  return function(...)
    local value, message = ...
    if value then return ... end
    if finalizer then pcall(finalizer) end
    error(setmetatable({message}, Failure), 0)
  end
end

socket.try = socket.newtry()

local function caught(ok, ...)
  if ok then return ... end
  local failure = ...
  if rawtype(failure) == "table" and core.getmetatable(failure) == Failure then return nil, failure[1] end
  error(failure, 0)
end

-- syntax: socket.protect(f) -> function       returns nil and the error when f raised it with `try`
function socket.protect(f)
  arg["function"](f, 1, "protect")
  return function(...) return caught(pcall(f, ...)) end
end

-- syntax: socket.skip(n, ...) -> the arguments after the first n
function socket.skip(count, ...)
  return select(min(arg.size(count, 1, "skip"), select("#", ...)) + 1, ...)
end

-- syntax: socket.choose{name = function} -> function(name, ...)
function socket.choose(functions)
  return function(name, ...)
    if core.type(name) ~= "string" then return functions.default(name, ...) end
    local f = functions[name] or core.raise("unknown key (" .. name .. ")")
    return f(...)
  end
end

-- ---- sources and sinks of ltn12

-- A callable object with the methods of LuaSocket's sources and sinks.
local function callable(sock, call)
  return setmetatable({getfd = function() return -1 end, dirty = function() return sock:dirty() end}, {__call = call})
end

local sinks, sources = {}, {}

sinks["keep-open"] = function(sock)
  return callable(sock, function(_, chunk)
    if chunk then return sock:send(chunk) end
    return 1
  end)
end

sinks["close-when-done"] = function(sock)
  return callable(sock, function(_, chunk)
    if chunk then return sock:send(chunk) end
    sock:close()
    return 1
  end)
end

sinks.default = sinks["keep-open"]

sources["by-length"] = function(sock, length)
  return callable(sock, function()
    if length <= 0 then return nil end
    local chunk, word = sock:receive(length < BLOCKSIZE and length or BLOCKSIZE)
    if not chunk then return nil, word end
    length = length - #chunk
    return chunk
  end)
end

sources["until-closed"] = function(sock)
  local is_over
  return callable(sock, function()
    if is_over then return nil end
    local chunk, word, part = sock:receive(BLOCKSIZE)
    if chunk then return chunk end
    if word ~= "closed" then return nil, word end
    is_over = true
    sock:close()
    return part ~= "" and part or nil
  end)
end

sources.default = sources["until-closed"]

local function maker(table_of, what)
  return function(name, sock, ...)
    name = arg.optional(arg.string, name, "default", 1, what)
    local make = table_of[name] or core.raise("bad argument #1 to '" .. what .. "' (unknown kind '" .. name .. "')")
    return make(arg.instance(sock, tcp.class, 2, what), ...)
  end
end

-- syntax: socket.sink("keep-open" | "close-when-done", tcp) -> sink
-- syntax: socket.source("by-length", tcp, bytes) -> source       socket.source("until-closed", tcp) -> source
socket.sink, socket.source = maker(sinks, "sink"), maker(sources, "source")

_G.socket = socket

return socket
