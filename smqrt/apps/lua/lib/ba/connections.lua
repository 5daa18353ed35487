-- Functions that open sockets (spec: bas-api §8.1).
local core = ...

local arg, rawtype, running = core.arg, core.rawtype, coroutine.running

local socket = core.socket
local py, made = socket.py, socket.made

local BLOCKING_TIMEOUT_MS <const>, COSOCKET_TIMEOUT_MS <const> = 1000, 20000

-- Gives a cosocket the connection of `handle`. Returns nil when the cosocket has ended or has a connection meanwhile.
local function adopt(cosocket, handle)
  if cosocket.handle or not cosocket.runner then return nil end
  cosocket.handle, cosocket.closed = handle, nil
  return cosocket
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
  local cosocket = socket.owners[running()]
  if cosocket and cosocket.handle then return nil, "incorrectuse" end
  local default_ms = cosocket and COSOCKET_TIMEOUT_MS or BLOCKING_TIMEOUT_MS
  local timeout_ms = arg.optional(arg.milliseconds, op.timeout, default_ms, "timeout", "connect")
  local tls = op.shark and core.tls.check(op.shark, "shark", "connect", "client")
  local handle, word, reason = py.connect(host, port, timeout_ms, intf, op.ipv6 == true, tls or nil, socket.protocols(op.alpn, "connect"))
  if not handle then return nil, word, reason end
  if not cosocket then return socket.new(handle) end
  if adopt(cosocket, handle) then return cosocket end
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
-- (port): listens on the port. (host, port): exchanges datagrams with this address only. op.port: the local port.
-- A cosocket without a connection becomes the socket.
function ba.socket.udpcon(host, port, op)
  if core.type(host) == "table" then host, op = nil, host end
  if core.type(port) == "table" then port, op = nil, port end
  if port == nil and tonumber(host) then host, port = nil, host end -- the text of a number is not a host's name
  host, port = arg.optional(arg.string, host, nil, 1, "udpcon"), arg.optional(arg.integer, port, nil, 2, "udpcon")
  local intf
  op, intf = options(op, 3, "udpcon")
  local local_port = arg.optional(arg.integer, op.port, not host and port or nil, "port", "udpcon")
  local cosocket = socket.owners[running()]
  if cosocket and cosocket.handle then cosocket = nil end
  local handle, word, reason = py.udp(host, port, local_port, intf, op.ipv6 == true)
  if not handle then return nil, word, reason end
  local sock = cosocket and adopt(cosocket, handle) or socket.new(handle)
  sock.is_udp = true
  return sock
end

-- syntax: ba.socket.toip(name) -> ip | nil, error
function ba.socket.toip(name)
  return py.lookup(arg.string(name, 1, "toip"))
end

-- syntax: ba.socket.stat() -> number of sockets, number of cosockets among them
function ba.socket.stat()
  local cosockets = 0
  for _, sock in pairs(socket.owners) do
    if sock.handle then cosockets = cosockets + 1 end
  end
  return py.count(), cosockets
end

-- syntax: ba.socket.req2sock(request [,raw | subprotocol]) -> socket [, data that came with the request] | nil, error
-- Returns a WebSocket for a WebSocket request, unless raw is true, and otherwise the raw connection. This ends the request.
-- After response:flush() the socket continues the body of the response, in chunks if it began in chunks, unless raw is true.
function ba.socket.req2sock(request, option)
  local exchange = core.exchange
  if not exchange then core.raise("req2sock: no HTTP server is running") end
  arg.instance(request, exchange.class, 1, "req2sock")
  local subprotocol = rawtype(option) == "string" and option or nil
  local written = not request.filter and (request.peek()) or nil -- a filter would miss the later output
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
