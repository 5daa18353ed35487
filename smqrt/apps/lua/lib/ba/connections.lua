-- Connections: the functions that make sockets (spec: bas-api §8.1).
local core = ...

local arg, rawtype, running = core.arg, core.rawtype, coroutine.running

local socket = core.socket
local py, made = socket.py, socket.made

local BLOCKING_TIMEOUT_MS <const>, COSOCKET_TIMEOUT_MS <const> = 1000, 20000

-- Makes `me`, a cosocket without a connection, the socket of `handle`; nil when it was closed or found another meanwhile.
local function adopt(me, handle)
  if me.handle or not me.runner then return nil end
  me.handle, me.closed = handle, nil
  return me
end

local function options(op, index, fname)
  op = arg.optional(arg.table, op, {}, index, fname)
  return op, arg.optional(arg.plain, op.intf, nil, "intf", fname)
end

-- syntax: ba.socket.connect(host, port [,{timeout=ms, shark=, alpn=, intf=, ipv6=}]) -> socket | nil, error [, reason]
-- In a cosocket without a connection, the cosocket becomes that connection.
function ba.socket.connect(host, port, op)
  host, port = arg.string(host, 1, "connect"), arg.integer(port, 2, "connect")
  local intf
  op, intf = options(op, 3, "connect")
  local me = socket.owners[running()]
  if me and me.handle then return nil, "incorrectuse" end
  local timeout_ms = arg.optional(arg.milliseconds, op.timeout, me and COSOCKET_TIMEOUT_MS or BLOCKING_TIMEOUT_MS, "timeout", "connect")
  local tls = op.shark and core.tls.check(op.shark, "shark", "connect", "client")
  local handle, word, reason = py.connect(host, port, timeout_ms, intf, op.ipv6 == true, tls or nil, socket.protocols(op.alpn, "connect"))
  if not handle then return nil, word, reason end
  if not me then return socket.new(handle) end
  if adopt(me, handle) then return me end
  py.close(handle)
  return nil, "incorrectuse"
end

-- syntax: ba.socket.bind(port [,{shark=, intf=, ipv6=}]) -> listener | nil, error [, reason]
function ba.socket.bind(port, op)
  port = arg.integer(port, 1, "bind")
  local intf
  op, intf = options(op, 2, "bind")
  local tls = op.shark and core.tls.check(op.shark, "shark", "bind", "server")
  local listener, word, reason = made(py.bind(port, intf, op.ipv6 == true, tls or nil))
  if listener then listener.is_listener = true end
  return listener, word, reason
end

-- syntax: ba.socket.udpcon([host,] [port] [,{port=, intf=, ipv6=}]) -> socket | nil, error [, reason]
-- (port) listens on it, (host, port) talks to one partner only; op.port is the port of this side.
-- A cosocket without a connection becomes that socket.
function ba.socket.udpcon(host, port, op)
  if core.type(host) == "table" then host, op = nil, host end
  if core.type(port) == "table" then port, op = nil, port end
  if port == nil and tonumber(host) then host, port = nil, host end -- the text of a number is not a host's name
  host, port = arg.optional(arg.string, host, nil, 1, "udpcon"), arg.optional(arg.integer, port, nil, 2, "udpcon")
  local intf
  op, intf = options(op, 3, "udpcon")
  local local_port = arg.optional(arg.integer, op.port, not host and port or nil, "port", "udpcon")
  local me = socket.owners[running()]
  if me and me.handle then me = nil end
  local handle, word, reason = py.udp(host, port, local_port, intf, op.ipv6 == true)
  if not handle then return nil, word, reason end
  local sock = me and adopt(me, handle) or socket.new(handle)
  sock.is_udp = true
  return sock
end

-- syntax: ba.socket.toip(name) -> ip | nil, error
function ba.socket.toip(name)
  return py.lookup(arg.string(name, 1, "toip"))
end

-- syntax: ba.socket.stat() -> how many sockets there are, how many of them are cosockets
function ba.socket.stat()
  local cosockets = 0
  for _, sock in pairs(socket.owners) do
    if sock.handle then cosockets = cosockets + 1 end
  end
  return py.count(), cosockets
end

-- syntax: ba.socket.req2sock(request [,raw | subprotocol]) -> socket [, data that came with the request] | nil, error
-- A WebSocket when the request asks for one (unless raw is true), otherwise the bare connection. This ends the request.
-- After response:flush() the socket continues the body of the response, in chunks if it began in chunks, unless raw is true.
function ba.socket.req2sock(request, option)
  local exchange = core.exchange
  if not exchange then core.raise("req2sock: there are no requests here") end
  arg.instance(request, exchange.class, 1, "req2sock")
  local subprotocol = rawtype(option) == "string" and option or nil
  local written = not request.filter and (request.peek()) or nil -- a filter would have to see what follows
  local sock, data, detail = made(py.take_request(exchange.handle_of(request), option == true, subprotocol, written))
  if sock then exchange.expire(request) end
  if detail then return sock, data, detail end
  return sock, data
end

-- syntax: ba.socket.sock2req(socket [,data]) -> true | nil, error      `data` precedes what is read from the connection
function ba.socket.sock2req(sock, data)
  socket.self_of(sock, "sock2req")
  if not sock.handle then return nil, "socketclosed" end
  local done, word = py.give_request(sock.handle, arg.optional(arg.string, data, "", 2, "sock2req"))
  if done then sock.handle, sock.closed = nil, true end
  return done, word
end

-- syntax: ba.socket.http2sock(http) -> socket [, data that was received already] | nil, error
function ba.socket.http2sock(http)
  return made(py.take_http(core.http.check(http, 1, "http2sock")))
end
