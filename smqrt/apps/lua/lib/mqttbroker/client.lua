-- Local client: a client in the process of the broker, with the methods of mqttc (spec: smq §8). Its callbacks run in sequence in
-- a cosocket, so they may block without blocking the publisher.

local inbox = require "mqttbroker.inbox"
local python = require "mqttbroker.python"

local py = python.py

local PUBLISH <const>, RETAIN <const> = 0x30, 0x01
local NO_LOCAL <const>, AS_PUBLISHED <const> = 0x04, 0x08 -- options of SUBSCRIBE
local NORMAL <const>, WITH_WILL <const> = 0x00, 0x04      -- reasons of DISCONNECT
local FIRST_FAILURE <const> = 0x80
local MAX_NUMBER <const> = 0xFFFF                         -- of a packet

local Client = {}
Client.__index = Client

local clients = {} -- number in Python -> client, while it is connected

local function ignore() end

local function trace_message(topic, payload)
  trace(topic, #payload)
end

-- An identifier for a client without one.
local function random_identifier()
  return "auto-" .. ba.rndbs(8):gsub(".", function(c) return ("%02x"):format(c:byte()) end)
end

-- ---- arguments

local function check(accepted, index, name, expected, value)
  if not accepted then error(("bad argument #%d to '%s' (%s expected, got %s)"):format(index, name, expected, type(value)), 3) end
end

-- A number is converted to text, as in Lua's own functions.
local function text(value) return type(value) == "number" and tostring(value) or value end

local function optional(value, kind, index, name)
  check(value == nil or type(value) == kind, index, name, kind, value)
end

-- Whether a topic name is valid: not empty, and without wildcards.
local function is_name(topic) return topic ~= "" and not topic:find "[+#]" end

-- The error of an invalid will; nil for a valid one.
local function fault_of_will(will)
  if type(will) ~= "table" then return "a will is a table {topic=, payload=}" end
  local topic = text(will.topic)
  if type(topic) ~= "string" or not is_name(topic) then return "will.topic is a topic without wildcards" end
end

-- ---- events of the broker

-- The callbacks for a message: the `onpub` of each matching subscription, and the client's `onpub` once if one has none.
local function callbacks_for(self, identifiers)
  local list, has_default = {}, false
  for _, identifier in ipairs(identifiers) do
    local onpub = self.onpubs[identifier]
    if onpub then list[#list + 1] = onpub else has_default = true end
  end
  if has_default then list[#list + 1] = self.onpub end
  return list
end

local events = {}

function events.connect(self, packed)
  self.inbox:put(0, function()
    if self.ended then return end
    self.connected = true
    local state = {sessionpresent = false, reasoncode = NORMAL, properties = python.load(packed)}
    local _, accepted = self.broker:call(nil, "onstatus", self.onstatus, "mqtt", "connect", state)
    if accepted == false then return self:disconnect() end -- nil, from an onstatus without a result or with an error, keeps the connection
    for _, action in ipairs(self.deferred) do action() end
    self.deferred = {}
  end)
end

function events.answer(self, number, code)
  local answered = self.requests[number]
  self.requests[number] = nil
  answered(code)
end

function events.message(self, topic, payload, retain, packed, ...)
  local list, header = callbacks_for(self, {...}), retain and PUBLISH | RETAIN or PUBLISH
  self.inbox:put(#topic + #payload, function()
    for _, onpub in ipairs(list) do
      local value = self.bytearrays and ba.bytearray.create(payload) or payload
      self.broker:call(nil, "onpub", onpub, topic, value, packed and python.load(packed) or {}, header)
    end
  end)
end

function events.disconnect(self, code) self:stop(code) end

local event = python.ref(function(number, kind, ...)
  local self = clients[number]
  if not self then return end
  events[kind](self, ...)
  self.inbox:wake()
end)

-- ---- connection and disconnection

local function set_will(self, will)
  if not will then return py.set_will(self.number) end
  local payload = will.payload or will.message or ""
  py.set_will(self.number, text(will.topic), tostring(payload), will.retain == true, python.pack_properties(will.properties or {}))
end

local function leave(self, with_will)
  self.connected, self.ended = false, true
  self.broker.locals[self] = nil
  if not self.number then return end
  clients[self.number] = nil
  py.leave(self.number, with_will)
end

--- Disconnect the client from the broker's side; it does not reconnect.
function Client:stop(code)
  if self.ended then return end
  leave(self, true)
  local state = {reasoncode = code, properties = {}}
  self.inbox:finish(function() self.broker:call(nil, "onstatus", self.onstatus, "mqtt", "disconnect", state) end)
end

local function connect(self)
  if self.ended then return end
  if not self.broker.running then
    leave(self, false)
    self.inbox:finish(function() self.broker:call(nil, "onstatus", self.onstatus, "sock", "cannotconnect") end)
    return
  end
  self.number = py.join(self.broker.number, event, self.id)
  clients[self.number] = self
  set_will(self, self.will)
end

-- Run `action` now, or when the client connects. Returns whether it is connected.
local function when_connected(self, action)
  if self.ended then return false end
  if self.connected then action() else self.deferred[#self.deferred + 1] = action end
  return self.connected
end

--- A client of `broker`, or nil and the error. onstatus(type, code, status): returning false disconnects.
local function new(broker, onstatus, onpub, options)
  local fault = options.will and fault_of_will(options.will)
  if fault then return nil, "bad argument #3 to 'createClient' (" .. fault .. ")" end
  local self = setmetatable({
    broker = broker, will = options.will, id = options.clientidentifier or options.clientId or random_identifier(),
    onstatus = onstatus or ignore, onpub = onpub or trace_message, bytearrays = options.recbta ~= false,
    deferred = {}, connected = false, ended = false, inbox = inbox.new(broker.totals),
    requests = {}, last_number = 0,                   -- number of a packet -> function that gets the reason code
    onpubs = {}, identifiers = {}, last_identifier = 0, -- identifier of a subscription -> onpub; filter -> identifier
  }, Client)
  broker.locals[self] = true
  self.inbox:put(0, function() connect(self) end)
  self.inbox:start()
  return self
end

-- Send SUBSCRIBE, or UNSUBSCRIBE when `options` is nil. `answered` gets the reason code.
local function request(self, answered, filter, options, identifier)
  local number = self.last_number
  repeat number = number % MAX_NUMBER + 1 until not self.requests[number]
  self.last_number, self.requests[number] = number, answered
  py.request(self.number, number, filter, options, identifier)
end

-- ---- the methods

local function is_payload(value)
  local kind = type(value)
  return kind == "string" or kind == "number" or kind == "userdata" -- a byte array
end

--- Publish: publish(topic, msg [,{retain}] [,prop]). Returns whether the client is connected; if not, it publishes when it connects.
function Client:publish(topic, payload, options, values)
  topic = text(topic)
  check(type(topic) == "string" and is_name(topic), 1, "publish", "topic without wildcards", topic)
  check(is_payload(payload), 2, "publish", "string, number or byte array", payload)
  optional(options, "table", 3, "publish")
  optional(values, "table", 4, "publish")
  local retain, bytes, properties = options ~= nil and options.retain == true, tostring(payload), python.pack_properties(values or {})
  return when_connected(self, function() py.publish(self.number, topic, bytes, retain, properties) end)
end

--- Subscribe: subscribe(topic [,onsuback(topic, reason, prop)] [,{nolocal, retainaspublished, onpub}] [,prop]). Returns as `publish`.
function Client:subscribe(filter, onsuback, options)
  filter = text(filter)
  check(type(filter) == "string", 1, "subscribe", "string", filter)
  if type(onsuback) == "table" then onsuback, options = nil, onsuback end
  optional(onsuback, "function", 2, "subscribe")
  optional(options, "table", 3, "subscribe")
  options, onsuback = options or {}, onsuback or ignore
  local bits = (options.nolocal and NO_LOCAL or 0) | (options.retainaspublished and AS_PUBLISHED or 0)
  return when_connected(self, function()
    local identifier = self.last_identifier + 1
    self.last_identifier, self.onpubs[identifier] = identifier, options.onpub
    request(self, function(code)
      local old = self.identifiers[filter]
      if code < FIRST_FAILURE then self.identifiers[filter] = identifier else old = identifier end
      if old then self.onpubs[old] = nil end
      self.inbox:put(0, function() self.broker:call(nil, "onsuback", onsuback, filter, code, {}) end)
    end, filter, bits, identifier)
  end)
end

--- Unsubscribe: unsubscribe(topic [,onunsuback(topic, reason, prop)] [,prop]). Returns as `publish`.
function Client:unsubscribe(filter, onunsuback)
  filter = text(filter)
  check(type(filter) == "string", 1, "unsubscribe", "string", filter)
  if type(onunsuback) == "table" then onunsuback = nil end
  optional(onunsuback, "function", 2, "unsubscribe")
  return when_connected(self, function()
    request(self, function(code)
      local identifier = self.identifiers[filter]
      if identifier then self.onpubs[identifier], self.identifiers[filter] = nil, nil end
      self.inbox:put(0, function() self.broker:call(nil, "onunsuback", onunsuback or ignore, filter, code, {}) end)
    end, filter)
  end)
end

--- Disconnect without reconnecting. reason 4: publish the will. Returns whether the client was connected.
function Client:disconnect(reason)
  if self.ended then return false end
  local was_connected = self.connected
  leave(self, was_connected and reason == WITH_WILL)
  self.inbox:finish()
  return was_connected
end

function Client:close()
  self:disconnect()
end

Client.__close = Client.close

--- Set the will; nil removes it. Raises an error when it is invalid.
function Client:setwill(will)
  local fault = will ~= nil and fault_of_will(will)
  if fault then error("bad argument #1 to 'setwill' (" .. fault .. ")", 2) end
  self.will = will
  if self.number and not self.ended then set_will(self, will) end
end

--- The number of calls deferred until the client connects, whether it is connected, whether it has ended.
function Client:status()
  return #self.deferred, self.connected, self.ended
end

return {new = new}
