-- require "mqtt3c": the MQTT 3.1.1 client (specification: smq.md 9).
local core = ...

local arg, dispatch, max, mqtt, select, setmetatable = core.arg, core.mqtt.dispatch, math.max, core.mqtt, select, setmetatable
local py = mqtt.py

local KEEPALIVE_S <const>, SHORTEST_KEEPALIVE_S <const> = 600, 60
local PORT <const>, TLS_PORT <const> = 1883, 8883
local VALUES <const> = 6 -- of one event

local module = {}

-- ---- connections that the application runs

local class = mqtt.class

local function check_trust(sock, host, op)
  if op.nocheck or not sock:cipher() then return true end
  return sock:trusted(host)
end

-- The connected socket, or nil, error, kind.
local function connected(addr, op)
  if core.type(addr) ~= "string" then
    core.socket.self_of(addr, "connect")
    if not addr.handle then return nil, "socketclosed", "sock" end
    local ok, status = check_trust(addr, nil, op)
    if not ok then return nil, status, "sock" end
    return addr
  end
  local tls = mqtt.tls(op)
  local sock, word = ba.socket.connect(addr, op.port or (tls and TLS_PORT or PORT),
    {timeout = op.timeout, shark = tls, alpn = op.alpn, intf = op.intf, ipv6 = op.ipv6})
  if not sock then return nil, word, "sock" end
  local ok, status = check_trust(sock, addr, op)
  if ok then return sock end
  sock:close()
  return nil, status, "sock"
end

-- The option names of `connect` in those of `create`.
local function translated(op)
  local keepalive = arg.optional(arg.integer, op.keepalive, KEEPALIVE_S, "keepalive", "connect")
  return {
    keepalive = max(keepalive, SHORTEST_KEEPALIVE_S),
    clientidentifier = op.id or op.clientidentifier,
    username = op.uname or op.username,
    password = op.passwd or op.password,
    will = op.will,
    timeout = op.timeout,
  }
end

-- syntax: connect(addr | socket, onpub(topic, data) [, op]) -> mqtt | nil, error, kind
-- Blocks, or waits in a cosocket. kind: "sock", "mqtt", or true when the error is a CONNACK code.
function module.connect(addr, onpub, op)
  arg["function"](onpub, 2, "connect")
  op = arg.optional(arg.table, op, {}, 3, "connect")
  local sock, word, kind = connected(addr, op)
  if not sock then return nil, word, kind end
  local number, fault, etype = py.connect(sock.handle, mqtt.options(translated(op), nil, 4, "connect"))
  if number then return setmetatable({number = number, sock = sock, onpub = onpub, is_text = true, runs = true}, class) end
  sock:close()
  return nil, fault, etype
end

local function deliver(self, kind, ...)
  if kind == nil then return false, ... end
  dispatch(self, kind, ...)
  if select("#", ...) < VALUES then return true end
  return deliver(self, select(VALUES, ...))
end

local Run = {__close = function(turn) -- the loop returned, failed, or was killed
  py.dropped(turn.self.number)
  turn.self.sock:close()
end}

-- syntax: mqtt:run() -> nil, error        receives until the connection ends; callbacks are called in here
function mqtt.class.__index.run(self)
  mqtt.number_of(self, "run")
  if not self.runs then core.raise("run: only a client made by connect is run") end
  local turn <close> = setmetatable({self = self}, Run)
  while true do
    local more, word = deliver(self, py.take(self.number))
    if not more then return nil, word end
  end
end

-- ---- clients that connect by themselves

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
