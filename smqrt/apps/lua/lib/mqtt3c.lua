-- require "mqtt3c": the MQTT 3.1.1 client (spec: smq §9).
local core = ...

local arg, dispatch, find, format, max, mqtt, select, setmetatable = core.arg, core.mqtt.dispatch, string.find, string.format, math.max, core.mqtt, select, setmetatable
local py = mqtt.py

local KEEPALIVE_S <const>, SHORTEST_KEEPALIVE_S <const> = 600, 60
local PORT <const>, TLS_PORT <const> = 1883, 8883
local EVENT_VALUES <const> = 6 -- per event that `py.take` returns

local module = {}

-- ---- clients of `connect`, whose messages the application receives with `run`

local class = mqtt.class

-- Whether the connection may be used: true, or nil and the trust status. Without credentials, an untrusted server is accepted.
local function check_trust(sock, host, op, has_credentials)
  if op.nocheck or not sock:cipher() then return true end
  local ok, status = sock:trusted(host)
  if ok or has_credentials then return ok, status end
  tracep(false, 0, format("%sthe certificate of %s is not trusted (%s); connected anyway, because no credentials are sent",
    core.where(), host or "the MQTT broker", status))
  return true
end

-- Whether Python opens the connection: to a URL or a list, or through a proxy.
local function is_for_python(addr, op)
  local kind = core.type(addr)
  return kind == "table" or kind == "string" and (op.proxy or find(addr, "://", 1, true))
end

-- The connected socket, or nil and an error.
local function connected(addr, op, has_credentials)
  local host, sock, word
  if core.type(addr) == "string" then
    local tls = mqtt.tls(op)
    host = addr
    sock, word = ba.socket.connect(addr, op.port or (tls and TLS_PORT or PORT),
      {timeout = op.timeout, shark = tls, alpn = op.alpn, intf = op.intf, ipv6 = op.ipv6})
  elseif addr.handle then
    sock = addr
  else
    word = "socketclosed"
  end
  if not sock then return nil, word end
  local ok, status = check_trust(sock, host, op, has_credentials)
  if ok then return sock end
  sock:close()
  return nil, status
end

-- The options of `connect` as options of `create`. The keep-alive of `connect` has a different default, and a minimum.
local function options_of_connect(op)
  mqtt.warn_of_unknown(op, 4, "connect")
  local options = {}
  for name, value in pairs(op) do options[name] = value end
  options.keepalive = arg.optional(arg.integer, op.keepalive, KEEPALIVE_S, "keepalive", "connect")
  py.check(mqtt.options(options, nil, 4, "connect"))
  options.keepalive = max(options.keepalive, SHORTEST_KEEPALIVE_S)
  return options
end

-- syntax: connect(addr | addrs | socket, onpub(topic, data) | nil [, op]) -> mqtt | nil, error, kind
-- Blocks, or waits in a cosocket. kind: "sock", "mqtt", or true when the error is a CONNACK code.
function module.connect(addr, onpub, op)
  local is_socket = core.getmetatable(addr) == core.socket.class
  if not is_socket and core.type(addr) ~= "string" and (core.type(addr) ~= "table" or #addr == 0) then
    core.bad_argument(1, "connect", "addr: a host name or URL, a list of them, or a connected socket", addr)
  end
  op = arg.optional(arg.table, op, {}, 3, "connect")
  if op.onmessage == nil then arg["function"](onpub, 2, "connect") end
  op = options_of_connect(op)
  local has_credentials = (op.uname or op.username or op.passwd or op.password) ~= nil
  local addresses, sock, word
  if not is_socket and is_for_python(addr, op) then
    addresses = mqtt.addresses(addr)
  else
    sock, word = connected(addr, op, has_credentials)
    if not sock then return nil, word, "sock" end
  end
  local number, handle, etype = py.connect(sock and sock.handle, addresses, mqtt.options(op, nil, 4, "connect"))
  if number then
    sock = sock or core.socket.new(handle)
    return setmetatable({number = number, sock = sock, onpub = onpub, onmessage = op.onmessage, is_text = true, runs = true}, class)
  end
  if sock then sock:close() end
  return nil, handle, etype
end

local function deliver(self, kind, ...)
  if kind == nil then return false, ... end
  dispatch(self, kind, ...)
  if select("#", ...) < EVENT_VALUES then return true end
  return deliver(self, select(EVENT_VALUES, ...))
end

local Run = {__close = function(guard) -- also after an error, or when the activity is killed
  guard.self.is_running = false
  py.dropped(guard.self.number)
  guard.self.sock:close()
end}

-- syntax: mqtt:run() -> nil, error        receives until the connection ends; callbacks run in this call
function mqtt.class.__index.run(self)
  mqtt.number_of(self, "run")
  if not self.runs then core.raise("run: this client was made by create, which receives by itself; only clients of connect have run") end
  if self.is_running then core.raise("run: another run of this client is active; a client has one run at a time") end
  self.is_running = true
  local guard <close> = setmetatable({self = self}, Run)
  while true do
    local more, word = deliver(self, py.take(self.number))
    if not more then return nil, word end
  end
end

-- ---- clients of `create`, which reconnect

-- syntax: create(addr | connect(mqtt, op), onstatus(type, code, status) [, onpub(topic, data)] [, op]) -> mqtt
function module.create(addr, onstatus, onpub, op)
  if core.type(onpub) == "table" then onpub, op = nil, onpub end
  op = arg.optional(arg.table, op, {}, 4, "create")
  local self = {
    onstatus = arg["function"](onstatus, 2, "create"),
    onpub = arg.optional(arg["function"], onpub, function(topic) trace("MQTT message without a callback:", topic) end, 3, "create"),
    is_text = true,
  }
  return mqtt.create(self, addr, op, nil, 4)
end

return module
