-- A client inside the process of the broker, with the methods of mqttc (spec: smq §8). Its callbacks run one after the other in a
-- cosocket of its own, so they may wait without blocking the publisher.

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

local function convert(self, payload)
  return self.bytearrays and ba.bytearray.create(payload) or payload
end

-- The callbacks for a message: one for each subscription that has its own, the general one at most once.
local function receivers(self, subscription)
  local list, general = {}, false
  for _, part in ipairs(subscription.parts or {subscription}) do
    if part.onpub then list[#list + 1] = part.onpub else general = true end
  end
  if general then list[#list + 1] = self.onpub end
  return list
end

local function hand_over(self, incoming, subscription)
  local kept = subscription.retainaspublished and incoming.retain
  for _, onpub in ipairs(receivers(self, subscription)) do
    local first = kept and PUBLISH | RETAIN or PUBLISH
    self.broker:ask(nil, "onpub", onpub, incoming.topic, convert(self, incoming.payload), incoming.plain(), first)
  end
end

--- For the router.
function Client:deliver(incoming, subscription)
  local size = #incoming.topic + #incoming.payload
  self.inbox:put(size, function() hand_over(self, incoming, subscription) end)
end

function Client:flush()
  self.inbox:wake()
end

-- ---- begin and end

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

--- Ends it from the side of the broker; it does not reconnect.
function Client:stop(code)
  if self.ended then return end
  leave(self, true)
  local state = {reasoncode = code, properties = {}}
  self.inbox:finish(function() self.broker:ask(nil, "onstatus", self.onstatus, "mqtt", "disconnect", state) end)
end

local function refuse(self)
  leave(self, false)
  self.inbox:finish(function() self.broker:ask(nil, "onstatus", self.onstatus, "sock", "cannotconnect") end)
end

local function connect(self)
  if self.ended then return end
  if not self.broker.running then return refuse(self) end
  self.broker.router:enter(self)
  self.connected = true
  local state = {sessionpresent = false, reasoncode = refusal.NORMAL, properties = self.broker:capabilities()}
  local _, keep = self.broker:ask(nil, "onstatus", self.onstatus, "mqtt", "connect", state)
  if keep == false then return self:disconnect() end -- nil keeps: an onstatus that only looks on, or failed
  for _, action in ipairs(self.waiting) do action() end
  self.waiting = {}
end

-- Does something now, or as soon as the client is connected. Answers whether it is.
local function when_connected(self, action)
  if self.ended then return false end
  if self.connected then action() else self.waiting[#self.waiting + 1] = action end
  return self.connected
end

--- A client of `broker`, or nil and what is wrong. onstatus(type, code, status): leaves by answering false.
local function new(broker, onstatus, onpub, options)
  local fault = options.will and fault_of_will(options.will)
  if fault then return nil, "bad argument #3 to 'createClient' (" .. fault .. ")" end
  local self = setmetatable(broker.router.account(), Client)
  self.broker, self.will = broker, options.will
  self.id = options.clientidentifier or options.clientId or broker.random_identifier()
  self.onstatus, self.onpub = onstatus or ignore, onpub or trace_message
  self.bytearrays = options.recbta ~= false
  self.waiting, self.connected, self.ended = {}, false, false
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

--- Publishes: publish(topic, msg [,{retain}] [,prop]). Returns whether it is connected; otherwise it is done on connection.
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

--- Subscribes: subscribe(topic [,onsuback(topic, reason, prop)] [,{nolocal, retainaspublished, onpub}] [,prop]).
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
    self.inbox:put(0, function() self.broker:ask(nil, "onsuback", onsuback, filter, code, {}) end)
    self.inbox:wake()
  end)
end

--- Unsubscribes: unsubscribe(topic [,onunsuback(topic, reason, prop)] [,prop]).
function Client:unsubscribe(filter, onunsuback)
  filter = text(filter)
  check(type(filter) == "string", 1, "unsubscribe", "string", filter)
  if type(onunsuback) == "table" then onunsuback = nil end
  optional(onunsuback, "function", 2, "unsubscribe")
  return when_connected(self, function()
    local code = self.broker.router:unsubscribe(self, filter)
    self.inbox:put(0, function() self.broker:ask(nil, "onunsuback", onunsuback or ignore, filter, code, {}) end)
    self.inbox:wake()
  end)
end

--- Ends the client for good. reason 4: its will is published. Returns whether it was connected.
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

--- The will, nil for none; a wrong one raises an error.
function Client:setwill(will)
  local fault = will ~= nil and fault_of_will(will)
  if fault then error("bad argument #1 to 'setwill' (" .. fault .. ")", 2) end
  self.will = will
end

--- How many calls wait for the connection, whether it is connected, whether it has ended.
function Client:status()
  return #self.waiting, self.connected, self.ended
end

return {new = new}
