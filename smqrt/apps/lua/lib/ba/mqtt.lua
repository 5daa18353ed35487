-- MQTT clients: the common part of the modules mqttc and mqtt3c (spec: smq §8 and §9).
--
-- `number` identifies a client in Python.
local core, py = ...

local arg, format, ref, dump, load, getmetatable, rawtype, select, setmetatable, tostring, xpcall =
  core.arg, string.format, core.ref, core.table_codec.dump, core.table_codec.load, core.getmetatable, core.rawtype, select, setmetatable, tostring, xpcall
local create_bytearray, is_bytearray = ba.bytearray.create, core.is_bytearray

local methods = {}
local class = core.class("mqtt", methods)
local clients = {} -- number -> client, until it has stopped

local mqtt = {class = class, py = py}
core.mqtt = mqtt

local function number_of(self, fname)
  return arg.instance(self, class, "self", fname).number
end
mqtt.number_of = number_of

-- ---- events

local handlers = {}

-- Passes a message to the function of its subscription, or else to that of the client.
function handlers.pub(self, f, topic, payload, properties, cpt)
  local onpub = f and core.deref(f) or self.onpub -- a local variable: a traceback shows its name
  if self.is_text then
    onpub(topic, payload)
  else
    onpub(topic, self.recbta and create_bytearray(payload) or payload, load(properties), cpt)
  end
end

local message_methods = {}
local message_class = core.class("mqttmessage", message_methods)

-- A message as an object. ack: its number for `py.ack`; nil when it needs no acknowledgement.
local function message_of(self, topic, payload, properties, cpt, ack)
  if self.recbta and not self.is_text then payload = create_bytearray(payload) end
  return setmetatable({
    topic = topic, payload = payload, properties = load(properties),
    qos = (cpt >> 1) & 3, retain = cpt & 1 == 1, dup = cpt & 8 == 8, key = ack,
  }, message_class)
end

-- Passes a message as an object to the function of its subscription, or else to that of the client.
function handlers.message(self, f, topic, payload, properties, flags)
  local onmessage = f and core.deref(f) or self.onmessage
  local ack = flags >> 8
  onmessage(message_of(self, topic, payload, properties, flags & 255, ack > 0 and ack or nil))
end

function handlers.ack(self, f, topic, reason, properties)
  local onsuback = core.deref(f)
  if self.is_text then onsuback(reason) else onsuback(topic, reason, load(properties)) end
end

-- The answer to a list of topic filters.
function handlers.acks(self, f, packed, _, properties)
  local onsuback, answer = core.deref(f), load(packed)
  if self.is_text then onsuback(answer.reasons) else onsuback(answer.topics, answer.reasons, load(properties)) end
end

function handlers.status(self, _, kind, code, status)
  status = load(status)
  if not next(status) then status = nil end
  local onstatus = self.onstatus
  local decision = onstatus(kind, code, status) -- no tail call: a traceback would not show its name
  return decision
end

function handlers.auth(self, _, data, has_data)
  local onauth = self.onauth
  local answer = onauth(has_data and data or nil)
  return answer
end

-- Connects by the application's function, in a cosocket that lasts as long as the connection.
function handlers.open(self)
  ba.socket.event(function()
    local function connect()
      local sock, word = self.connectfunc(self, self.opt)
      return sock, word, sock and core.socket.self_of(sock, "connect").handle -- raises when it is not a socket
    end
    local ok, sock, word, handle = xpcall(connect, core.traceback)
    if not ok then core.log_error("MQTT connect function failed: " .. tostring(sock)) end
    py.opened(self.number, handle or nil, ok and word and tostring(word) or nil)
    if handle then sock:close() end
  end)
end

function mqtt.dispatch(self, kind, ...)
  return handlers[kind](self, ...)
end

py.on_event(ref(function(number, kind, ...)
  local self = clients[number]
  if kind == "end" then
    clients[number] = nil
  elseif self then
    return handlers[kind](self, ...)
  elseif kind == "message" then
    py.message_dropped(select(5, ...) >> 8)
  end
end))

-- ---- methods

local function octets(data, index, fname)
  if rawtype(data) == "string" then return data end
  if rawtype(data) == "number" or is_bytearray(data) then return tostring(data) end
  core.bad_argument(index, fname, "string", data)
end

local function properties(value, index, fname)
  if value == nil then return nil end
  return dump(arg.table(value, index, fname))
end

local function qos_of(op, fname)
  return arg.optional(arg.integer, op.qos, 0, "qos", fname)
end

-- ---- deliveries

local delivery_methods = {}
local delivery_class = core.class("mqttdelivery", delivery_methods)

-- syntax: delivery:wait([ms]) -> true | nil, "timeout" | "closed" | "dropped" | "lost" | "toolarge" | "refused" [, reason]
function delivery_methods:wait(ms)
  local key = arg.instance(self, delivery_class, "self", "wait").key
  return py.delivery_wait(key, arg.optional(arg.milliseconds, ms, nil, 1, "wait"))
end

-- syntax: delivery:status() -> whether it is over, the error [, reason]
function delivery_methods:status()
  return py.delivery_status(arg.instance(self, delivery_class, "self", "status").key)
end

delivery_class.__gc = function(self) py.delivery_dropped(self.key) end

local function with_delivery(connected, key, ...)
  if connected == nil or not key then return connected, key, ... end
  return connected, setmetatable({key = key}, delivery_class)
end

-- syntax: mqtt:publish(topic, data [, {qos =, retain =, wait =, delivery =}] [, properties]) -> whether connected | nil, "full"
--         wait, true or milliseconds: as delivery:wait; delivery: also returns the delivery
function methods:publish(topic, data, op, props)
  local number = number_of(self, "publish")
  topic, data = arg.string(topic, 1, "publish"), octets(data, 2, "publish")
  if not op then return py.publish(number, topic, data, 0, false, properties(props, 4, "publish")) end
  arg.table(op, 3, "publish")
  local is_stored = self.opt and self.opt.store
  local qos, retain, packed = qos_of(op, "publish"), op.retain and true or false, properties(props, 4, "publish")
  if op.wait then
    local ms = op.wait ~= true and arg.milliseconds(op.wait, "wait", "publish") or nil
    return py.publish_wait(number, topic, data, qos, retain, packed, ms)
  elseif op.delivery then
    return with_delivery((is_stored and py.publish_delivery_stored or py.publish_delivery)(number, topic, data, qos, retain, packed))
  end
  return (is_stored and py.publish_stored or py.publish)(number, topic, data, qos, retain, packed)
end

-- ---- messages as objects

-- syntax: message:ack()        with the option manualack, acknowledges a message of QoS 1 or 2
function message_methods:ack()
  local key = arg.instance(self, message_class, "self", "ack").key
  if key then py.ack(key) end
end

message_class.__gc = function(self) if self.key then py.message_dropped(self.key) end end

local iteration_class = {__gc = function(iteration) if iteration.key then py.messages_dropped(iteration.key) end end}

-- syntax: for message in mqtt:messages() do ... end        until the client has ended
function methods:messages()
  local key = py.messages(number_of(self, "messages"))
  local iteration = setmetatable({key = key}, iteration_class)
  return function()
    if not iteration.key then return nil end
    local topic, payload, properties, cpt, ack = py.next_message(iteration.key)
    if not topic then
      iteration.key = nil
      return nil
    end
    return message_of(self, topic, payload, properties, cpt, ack)
  end
end

-- A topic filter and false, or a packed list of tables {filter [, qos or options]} and true.
local function filters_of(topic, fname)
  if rawtype(topic) ~= "table" then return arg.string(topic, 1, fname), false end
  local list = {}
  for i, item in ipairs(topic) do
    if rawtype(item) == "table" then
      local own = item[2]
      if own ~= nil and rawtype(own) ~= "table" then own = arg.integer(own, "qos", fname) end
      list[i] = {arg.string(item[1], 1, fname), own}
    else
      list[i] = {arg.string(item, 1, fname)}
    end
  end
  return dump(list), true
end

-- syntax: mqtt:subscribe(topic | {{topic [, qos | {qos =, nolocal =, ...}]}, ...} [, onsuback(topic, reason, properties)] [, {qos =, onpub =, onmessage =, nolocal =,
--         retainaspublished =, retainhandling =}] [, properties]) -> whether connected
function methods:subscribe(topic, onsuback, op, props)
  local number = number_of(self, "subscribe")
  if core.type(onsuback) == "table" then onsuback, op, props = nil, onsuback, op end
  local is_list
  topic, is_list = filters_of(topic, "subscribe")
  onsuback = arg.optional(arg["function"], onsuback, nil, 2, "subscribe")
  op = arg.optional(arg.table, op, {}, 3, "subscribe")
  local onmessage = arg.optional(arg["function"], op.onmessage, nil, "onmessage", "subscribe")
  local onpub = onmessage or arg.optional(arg["function"], op.onpub, nil, "onpub", "subscribe")
  return py.subscribe(number, topic, is_list, onpub and ref(onpub), onsuback and ref(onsuback), qos_of(op, "subscribe"),
    op.nolocal and true or false, op.retainaspublished and true or false,
    arg.optional(arg.integer, op.retainhandling, 0, "retainhandling", "subscribe"), properties(props, 4, "subscribe"),
    onmessage ~= nil)
end

-- syntax: mqtt:unsubscribe(topic | {topic, ...} [, onunsuback(topic, reason, properties)] [, properties]) -> whether connected
function methods:unsubscribe(topic, onunsuback, props)
  local number = number_of(self, "unsubscribe")
  if core.type(onunsuback) == "table" then onunsuback, props = nil, onunsuback end
  onunsuback = arg.optional(arg["function"], onunsuback, nil, 2, "unsubscribe")
  if self.is_text and onunsuback then -- MQTT 3.1.1 has no reason codes
    local f = onunsuback
    onunsuback = function() f() end
  end
  local is_list
  topic, is_list = filters_of(topic, "unsubscribe")
  return py.unsubscribe(number, topic, is_list, onunsuback and ref(onunsuback), properties(props, 3, "unsubscribe"))
end

local function will_of(will, fname)
  arg.table(will, "will", fname)
  local payload = will.payload == nil and will.message or will.payload
  return {
    topic = arg.string(will.topic, "will.topic", fname),
    payload = payload ~= nil and octets(payload, "will.payload", fname) or "",
    qos = qos_of(will, fname),
    retain = will.retain and true or false,
    properties = arg.optional(arg.table, will.properties, nil, "will.properties", fname),
  }
end

-- syntax: mqtt:setwill(will)        for the next connection; nil: without a will
function methods:setwill(will)
  local number = number_of(self, "setwill")
  py.setwill(number, will ~= nil and dump(will_of(will, "setwill")) or nil)
end

-- syntax: mqtt:authenticate([ms]) -> true | nil, "timeout" | "closed"        authenticates again (MQTT 5)
function methods:authenticate(ms)
  local number = number_of(self, "authenticate")
  return py.authenticate(number, arg.optional(arg.milliseconds, ms, nil, 1, "authenticate"))
end

-- syntax: mqtt:disconnect([reason]) -> whether it was connected        without reconnecting
function methods:disconnect(reason)
  return py.disconnect(number_of(self, "disconnect"), arg.optional(arg.integer, reason, 0, 1, "disconnect"))
end

function methods:close() py.disconnect(number_of(self, "close"), 0) end

class.__close = methods.close
class.__gc = function(self) -- stops a running client without references
  if self.runs then py.dropped(self.number) end
end

-- syntax: mqtt:status() -> queued, connected, disconnected
function methods:status() return py.status(number_of(self, "status")) end

-- ---- creation

--- Returns the TLS object of the options, or nil. `shark` is the older name of `secure`. true: the object in `shark`, if there is
-- one, or the default client.
function mqtt.tls(op)
  local tls = op.secure or op.shark
  if tls == true then tls = op.shark and op.shark ~= true and op.shark or ba.sharkclient() end
  return tls or nil
end

local function tls_of(op, fname)
  local tls = mqtt.tls(op)
  return tls and core.tls.check(tls, "secure", fname, "client")
end

local COPIED_OPTIONS <const> = {"port", "nocheck", "timeout", "ipv6", "keepalive", "queuesize", "queuebytes", "queuefull", "maxpacketsize",
  "inflight", "topicalias", "manualack", "cleanstart", "version", "authenticationmethod", "store", "reconnectdelay", "reconnectmax",
  "proxy", "proxyport", "socks", "proxyuser", "proxypass"}
local OLDER_NAMES <const> = {clientidentifier = "id", username = "uname", password = "passwd"} -- name -> its older name
local known_options = {secure = true, shark = true, intf = true, alpn = true, will = true, recbta = true, onauth = true, onmessage = true}
for _, name in ipairs(COPIED_OPTIONS) do known_options[name] = true end
for name, older in pairs(OLDER_NAMES) do known_options[name], known_options[older] = true, true end

local function warn_of_unknown(op, version, fname)
  local module = version == 5 and "mqttc" or "mqtt3c"
  for name in pairs(op) do
    if not known_options[name] then
      local near = core.nearest_name(name, known_options)
      local meant = near and format("; did you mean '%s'?", near) or ""
      tracep(false, 0, format("%s%s.%s: unknown option '%s' is ignored%s", core.where(), module, fname, tostring(name), meant))
    end
  end
end
mqtt.warn_of_unknown = warn_of_unknown

-- The version of a client: that of the module, or MQTT 3.1 with mqtt3c. In mqttc, the option has no meaning.
local function version_of(given, version)
  if version == 5 or given == nil or given == 4 then return version end
  if tostring(given) == "3.1" then return "3.1" end
  core.raise(format("version must be one of 4, '3.1', not '%s'", tostring(given)))
end

-- Returns the encoded options for Python, which checks most of the values.
function mqtt.options(op, props, version, fname)
  local options = {version = version, properties = props, tls = tls_of(op, fname)}
  options.source = arg.optional(arg.string, op.intf, nil, "intf", fname)
  for _, name in ipairs(COPIED_OPTIONS) do
    if op[name] ~= nil then options[name] = op[name] end
  end
  options.version = version_of(op.version, version)
  for name, older in pairs(OLDER_NAMES) do
    local given = op[name] == nil and older or name
    options[name] = arg.optional(arg.string, op[given], nil, given, fname)
  end
  options.onmessage = arg.optional(arg["function"], op.onmessage, nil, "onmessage", fname) ~= nil or nil
  if op.will ~= nil then options.will = will_of(op.will, fname) end
  if op.alpn ~= nil then
    options.alpn = {}
    for i, name in ipairs(core.type(op.alpn) == "table" and op.alpn or {op.alpn}) do
      options.alpn[i] = arg.string(name, "alpn", fname)
    end
  end
  return dump(options)
end

--- Returns the encoded list of an address or of a list of addresses; nil for other values.
function mqtt.addresses(addr)
  if core.type(addr) == "string" then return dump{addr} end
  if core.type(addr) ~= "table" then return nil end
  local list = {}
  for i, one in ipairs(addr) do
    list[i] = core.type(one) == "string" and one or ""
  end
  return dump(list)
end

--- Makes a client, which connects in the background. addr: a host name or URL, a list of them, a connected socket, or a function that
-- returns a socket.
-- Other values cause an error that onstatus receives (spec: bas-api §17).
function mqtt.create(self, addr, op, props, version)
  warn_of_unknown(op, version, "create")
  local addresses, socket
  if rawtype(addr) == "function" then
    self.connectfunc = addr
  elseif getmetatable(addr) == core.socket.class then
    socket, self.sock = addr.handle, addr
    if not socket then self.connectfunc = function() return nil, "socketclosed" end end
  else
    addresses = mqtt.addresses(addr) or dump{""}
  end
  self.opt, self.onmessage = op, op.onmessage
  if op.authenticationmethod ~= nil then self.onauth = arg["function"](op.onauth, "onauth", "create") end
  self.number = (op.store and py.create_stored or py.create)(addresses, socket, mqtt.options(op, props, version, "create"))
  clients[self.number] = self
  return setmetatable(self, class)
end
