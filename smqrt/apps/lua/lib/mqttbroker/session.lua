-- The protocol session of one network client, without its socket: input by `receive`, output through an outbox.

local codec = require "mqttbroker.codec"
local framer = require "mqttbroker.framer"
local identity = require "mqttbroker.identity"
local refusal = require "mqttbroker.refusal"

local byte, clock, pcall = string.byte, ba.clock, pcall

local CONNECT <const>, PUBLISH <const> = 1, 3
local CONNECT_MS <const> = 10000  -- from the connection to a complete CONNECT
local CLOSE_MS <const> = 5000     -- for the last bytes
local BODY_BITS <const> = 8       -- 256 bytes of a packet cost about as much as a small one: properties, UTF-8
local WORK <const> = 3000         -- packets and deliveries, a large one counting for several, until others get their turn
local KEEPALIVE_MS <const> = 1500 -- for each second that the client requested: one and a half times (MQTT 5 §3.1.2.10)

local Session = {}
Session.__index = Session

--- broker: see broker.lua. outbox: see outbox.lua. client: what callbacks get.
local function new(broker, outbox, client)
  local self = broker.router.account()
  self.broker, self.router, self.outbox, self.client = broker, broker.router, outbox, client
  self.framer = framer.new(broker.settings.max_packet_bytes)
  self.max_bytes, self.work, self.deadline_ms = math.maxinteger, 0, clock() + CONNECT_MS
  return setmetatable(self, Session)
end

-- ---- the end

local function closing_packet(self, code, text)
  if self.connected then return self.version >= 5 and codec.disconnect_packet(code, text) or "" end
  if not self.version then return "" end
  if self.version >= 5 then return codec.connack(5, code, {reasonstring = text}) end
  local returned = refusal.CONNACK_3[code]
  return returned and codec.connack(4, returned) or ""
end

-- The reason string is omitted where it exceeds the client's maximum (MQTT 5 §3.1.2.11.4).
local function fitting(self, code, text)
  local bytes = closing_packet(self, code, text)
  return #bytes <= self.max_bytes and bytes or closing_packet(self, code)
end

local function is_allowed(self, message)
  if self.identity and not identity.may_publish(self, message.topic) then return false end
  local onpublish = self.broker.settings.onpublish
  if not onpublish then return true end
  local asked, answer = self.broker:ask(self.client, "onpublish", onpublish, self.client, message.topic, message.payload, message.retain)
  return asked and answer ~= false
end

local function publish_will(self, will)
  if not is_allowed(self, will) then return end
  self.router:publish(will, self)
  self.router:flush()
end

-- The will gets a cosocket of its own, where onpublish may wait: this may be the timer, or the end of a killed activity.
local function leave(self)
  local will = self.will
  self.left, self.will = true, nil
  self.router:leave(self)
  if not will then return identity.leave(self) end
  ba.socket.event(function()
    publish_will(self, will)
    identity.leave(self)
  end)
end

--- Ends the session from the side of the broker: the client gets the reason (in MQTT 5), its will is published.
function Session:stop(code, text)
  if self.left then return end
  self.deadline_ms = clock() + CLOSE_MS
  self.outbox:finish(fitting(self, code, text))
  leave(self)
end

--- The connection is gone. word: the error of the socket.
function Session:ended(word)
  if not self.left then
    self.broker:report(self.client, "sock", word)
    leave(self)
  end
  self.outbox:finish("")
end

local function refuse(self, code, text)
  if self.left then return end
  self.broker:report(self.client, "mqtt", code, text)
  self:stop(code, text)
end

--- Ends overdue sessions: without a CONNECT, or without packets. Returns true when the connection must be closed immediately.
function Session:check(now_ms)
  if self.outbox:is_stuck(now_ms) then
    self:ended("timeout")
    return true
  end
  if not self.deadline_ms or now_ms < self.deadline_ms then return false end
  if self.left then return true end
  refuse(self, refusal.KEEP_ALIVE, "nothing was heard of the client for longer than the keep-alive allows")
  return false
end

-- ---- CONNECT

local function check_connect(request)
  if request.properties.authenticationmethod then
    refusal.raise(refusal.AUTHENTICATION_METHOD, "this broker knows user name and password only")
  end
  if request.id == "" and request.version < 5 and not request.clean then
    refusal.raise(refusal.CLIENT_IDENTIFIER, "a client without identifier must ask for a clean session")
  end
end

local function authenticate(self, request)
  local auth = self.broker.settings.auth
  if not auth then return end
  if auth == true then return identity.login(self, request) end
  local asked, accepted = self.broker:ask(self.client, "auth", auth, self.client, request.username, request.password)
  if not asked then refusal.raise(refusal.UNAVAILABLE, "the broker can't tell whether the client may connect") end
  if accepted then return end
  if request.username then refusal.raise(refusal.CREDENTIALS, "user name or password is wrong") end
  refusal.raise(refusal.NOT_AUTHORIZED, "the client must give user name and password")
end

local function capabilities(self, request)
  local values, expiry = self.broker:capabilities(), request.properties.sessionexpiryinterval
  values.assignedclientidentifier = request.id == "" and self.id or nil
  values.sessionexpiryinterval = expiry and expiry > 0 and 0 or nil
  return values
end

local function describe(self, request)
  local client = self.client
  client.clientidentifier, client.username, client.version = self.id, request.username, request.version
end

local function welcome(self, request)
  self.connected, self.will = true, request.will
  self.max_bytes = request.properties.maximumpacketsize or self.max_bytes
  self.limit_ms = request.keepalive_s > 0 and request.keepalive_s * KEEPALIVE_MS or nil
  self.session_expiry = request.properties.sessionexpiryinterval or 0
  self.outbox:put(codec.connack(self.version, refusal.NORMAL, capabilities(self, request)))
end

local function connect(self, body)
  self.version = codec.version(body)
  local request = codec.connect(body)
  check_connect(request)
  self.id = request.id ~= "" and request.id or self.broker.random_identifier()
  describe(self, request)
  authenticate(self, request)
  if self.left then return identity.leave(self) end -- it was the time of the application
  identity.check_taking_over(self, self.router.clients[self.id])
  self.router:enter(self)
  welcome(self, request)
end

-- ---- the other packets

local handlers = {}

handlers[CONNECT] = {0, function() refusal.protocol_error("a second CONNECT") end}

handlers[PUBLISH] = {nil, function(self, body, header)
  local message = codec.publish(header, body, self.version)
  if is_allowed(self, message) then self.work = self.work + self.router:publish(message, self) end
end}

handlers[8] = {2, function(self, body) -- SUBSCRIBE
  local id, wanted = codec.subscribe(body, self.version)
  local codes = {}
  for i, entry in ipairs(wanted) do
    local may = not self.identity or identity.may_subscribe(self, entry.filter)
    codes[i] = may and self.router:subscribe(self, entry) or refusal.NOT_AUTHORIZED
  end
  self.work = self.work + #wanted
  self.outbox:put(codec.suback(self.version, id, codes))
end}

handlers[10] = {2, function(self, body) -- UNSUBSCRIBE
  local id, filters = codec.unsubscribe(body, self.version)
  local codes = {}
  for i, filter in ipairs(filters) do codes[i] = self.router:unsubscribe(self, filter) end
  self.work = self.work + #filters
  self.outbox:put(codec.unsuback(self.version, id, codes))
end}

handlers[12] = {0, function(self, body) -- PINGREQ
  if body ~= "" then refusal.malformed("PINGREQ has a body") end
  self.outbox:put(codec.PINGRESP)
end}

handlers[14] = {0, function(self, body) -- DISCONNECT
  local code, found = codec.disconnect(body, self.version)
  if self.session_expiry == 0 and (found.sessionexpiryinterval or 0) > 0 then
    refusal.protocol_error("DISCONNECT asks for a session that CONNECT did not ask for")
  end
  if code == refusal.NORMAL then self.will = nil end
  self.outbox:finish("")
  self.deadline_ms = clock() + CLOSE_MS
  leave(self)
end}

local function handle(self, header, body)
  local kind = header >> 4
  local entry = handlers[kind]
  if not entry then refusal.protocol_error("a client of this broker sends no packets of type " .. kind) end
  if entry[1] and header & 0x0F ~= entry[1] then refusal.malformed("wrong flags in the first byte of a packet") end
  if not self.connected then return connect(self, body) end
  self.deadline_ms = nil -- counted again from the end of the packet: a callback may block
  return entry[2](self, body, header)
end

-- Refused at its first byte: the length that a web browser's "GET" seems to have would never be complete.
local function check_first(self, data)
  if self.begun or data == "" then return end
  self.begun = true
  if byte(data) ~= CONNECT << 4 then refusal.protocol_error("the first packet is not a CONNECT") end
end

local function take_packets(self)
  while not self.left and self.work < WORK do
    local header, body = self.framer:next()
    if not header then return end
    self.work = self.work + 1 + (#body >> BODY_BITS)
    handle(self, header, body)
    if not self.left then self.deadline_ms = self.limit_ms and clock() + self.limit_ms end
  end
end

local function fail(self, fault)
  local code, text, refused = refusal.of(fault)
  if not refused then trace("mqttbroker: " .. tostring(fault)) end
  refuse(self, code, text)
end

-- Whatever a packet is, it can end this session only.
local function try(self, f, ...)
  local ok, fault = pcall(f, self, ...)
  if not ok then fail(self, fault) end
end

local function add(self, data)
  check_first(self, data)
  self.framer:add(data)
end

--- Handles what was read. Answers whether others should have a turn before the rest of it is handled with `go_on`.
function Session:receive(data)
  if self.left then return false end
  try(self, add, data)
  return self:go_on()
end

function Session:go_on()
  try(self, take_packets)
  self.outbox:flush()
  self.router:flush()
  if self.work < WORK then return false end
  self.work = 0
  return not self.left
end

-- ---- what others send to it

function Session:deliver(message, subscription)
  local bytes = message:packet(self.version, subscription.identifiers, subscription.retainaspublished)
  if #bytes <= self.max_bytes then self.outbox:put(bytes) end
end

function Session:flush()
  self.outbox:flush()
end

return {new = new}
