-- Local client: a client in the process of the broker, with the methods of mqttc (spec: smq §8). Its callbacks run in sequence in
-- a cosocket, so they may block without blocking the publisher.

local codec = require "mqttbroker.codec"
local inbox = require "mqttbroker.inbox"
local message = require "mqttbroker.message"
local refusal = require "mqttbroker.refusal"
local topics = require "mqttbroker.topics"

local PUBLISH <const>, RETAIN <const> = 0x30, 0x01

local Client = {}
Client.__index = Client

local function ignore() end

local function trace_message(topic, payload)
  trace(topic, #payload)
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

-- The error of an invalid will; nil for a valid one.
local function fault_of_will(will)
  if type(will) ~= "table" then return "a will is a table {topic=, payload=}" end
  local topic = text(will.topic)
  if type(topic) ~= "string" or not topics.is_name(topic) then return "will.topic is a topic without wildcards" end
end

local function new_message(topic, payload, options, values)
  values = values or {}
  return message.new(topic, tostring(payload), options.retain == true, codec.pack_message(values), function() return values end)
end

-- ---- incoming packets

-- The callbacks for a message: each `onpub` of a subscription, and the client's `onpub` once if a subscription has none.
local function callbacks_for(self, subscription)
  local list, has_default = {}, false
  for _, part in ipairs(subscription.parts or {subscription}) do
    if part.onpub then list[#list + 1] = part.onpub else has_default = true end
  end
  if has_default then list[#list + 1] = self.onpub end
  return list
end

local function call_back(self, incoming, subscription)
  local header = subscription.retainaspublished and incoming.retain and PUBLISH | RETAIN or PUBLISH
  for _, onpub in ipairs(callbacks_for(self, subscription)) do
    local payload = self.bytearrays and ba.bytearray.create(incoming.payload) or incoming.payload
    self.broker:call(nil, "onpub", onpub, incoming.topic, payload, incoming.plain(), header)
  end
end

--- Queue a message; called by the router.
function Client:deliver(incoming, subscription)
  local size = #incoming.topic + #incoming.payload
  self.inbox:put(size, function() call_back(self, incoming, subscription) end)
end

function Client:flush()
  self.inbox:wake()
end

-- ---- connection and disconnection

local function publish_will(self)
  local will = self.will
  if not will then return end
  local payload = will.payload or will.message or ""
  self.broker.router:publish(new_message(text(will.topic), payload, will, will.properties), self)
end

local function leave(self, with_will)
  self.connected, self.ended = false, true
  self.broker.locals[self] = nil
  self.broker.router:leave(self)
  if with_will then publish_will(self) end
  self.broker.router:flush()
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
  self.broker.router:enter(self)
  self.connected = true
  local state = {sessionpresent = false, reasoncode = refusal.NORMAL, properties = self.broker:capabilities()}
  local _, accepted = self.broker:call(nil, "onstatus", self.onstatus, "mqtt", "connect", state)
  if accepted == false then return self:disconnect() end -- nil, from an onstatus without a result or with an error, keeps the connection
  for _, action in ipairs(self.deferred) do action() end
  self.deferred = {}
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
  local self = setmetatable(broker.router.account(), Client)
  self.broker, self.will = broker, options.will
  self.id = options.clientidentifier or options.clientId or broker.random_identifier()
  self.onstatus, self.onpub = onstatus or ignore, onpub or trace_message
  self.bytearrays = options.recbta ~= false
  self.deferred, self.connected, self.ended = {}, false, false
  self.inbox = inbox.new(broker.totals)
  broker.locals[self] = true
  self.inbox:put(0, function() connect(self) end)
  self.inbox:start()
  return self
end

-- ---- the methods

local function is_payload(value)
  local kind = type(value)
  return kind == "string" or kind == "number" or kind == "userdata" -- a byte array
end

--- Publish: publish(topic, msg [,{retain}] [,prop]). Returns whether the client is connected; if not, it publishes when it connects.
function Client:publish(topic, payload, options, values)
  topic = text(topic)
  check(type(topic) == "string" and topics.is_name(topic), 1, "publish", "topic without wildcards", topic)
  check(is_payload(payload), 2, "publish", "string, number or byte array", payload)
  optional(options, "table", 3, "publish")
  optional(values, "table", 4, "publish")
  local outgoing = new_message(topic, payload, options or {}, values)
  return when_connected(self, function()
    self.broker.router:publish(outgoing, self)
    self.broker.router:flush()
  end)
end

--- Subscribe: subscribe(topic [,onsuback(topic, reason, prop)] [,{nolocal, retainaspublished, onpub}] [,prop]). Returns as `publish`.
function Client:subscribe(filter, onsuback, options)
  filter = text(filter)
  check(type(filter) == "string", 1, "subscribe", "string", filter)
  if type(onsuback) == "table" then onsuback, options = nil, onsuback end
  optional(onsuback, "function", 2, "subscribe")
  optional(options, "table", 3, "subscribe")
  options, onsuback = options or {}, onsuback or ignore
  local wanted = {filter = filter, nolocal = options.nolocal, retainaspublished = options.retainaspublished, onpub = options.onpub}
  return when_connected(self, function()
    local code = self.broker.router:subscribe(self, wanted)
    self.inbox:put(0, function() self.broker:call(nil, "onsuback", onsuback, filter, code, {}) end)
    self.inbox:wake()
  end)
end

--- Unsubscribe: unsubscribe(topic [,onunsuback(topic, reason, prop)] [,prop]). Returns as `publish`.
function Client:unsubscribe(filter, onunsuback)
  filter = text(filter)
  check(type(filter) == "string", 1, "unsubscribe", "string", filter)
  if type(onunsuback) == "table" then onunsuback = nil end
  optional(onunsuback, "function", 2, "unsubscribe")
  return when_connected(self, function()
    local code = self.broker.router:unsubscribe(self, filter)
    self.inbox:put(0, function() self.broker:call(nil, "onunsuback", onunsuback or ignore, filter, code, {}) end)
    self.inbox:wake()
  end)
end

--- Disconnect without reconnecting. reason 4: publish the will. Returns whether the client was connected.
function Client:disconnect(reason)
  if self.ended then return false end
  local was_connected = self.connected
  leave(self, was_connected and reason == refusal.WITH_WILL)
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
end

--- The number of calls deferred until the client connects, whether it is connected, whether it has ended.
function Client:status()
  return #self.deferred, self.connected, self.ended
end

return {new = new}
