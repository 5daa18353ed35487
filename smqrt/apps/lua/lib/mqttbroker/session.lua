-- Protocol session of a network client, without its socket: input by `receive`, output through an outbox.

local codec = require "mqttbroker.codec"
local framer = require "mqttbroker.framer"
local identity = require "mqttbroker.identity"
local refusal = require "mqttbroker.refusal"

local byte, clock, pcall = string.byte, ba.clock, pcall

local CONNECT <const>, PUBLISH <const> = 1, 3
local CONNECT_MS <const> = 10000        -- from the connection to a complete CONNECT
local CLOSE_MS <const> = 5000           -- to write the last packets
local BODY_BITS <const> = 8             -- decoding 256 bytes costs about as much as a small packet
local MAX_WORK <const> = 3000           -- before other activities run; 1 is a small packet or its delivery
local KEEPALIVE_MS_PER_S <const> = 1500 -- one and a half times the requested keep-alive (MQTT 5 §3.1.2.10)

local Session = {}
Session.__index = Session

--- broker: see broker.lua. outbox: see outbox.lua. client: the table that callbacks get.
local function new(broker, outbox, client)
  local self = broker.router.account()
  self.broker, self.router, self.outbox, self.client = broker, broker.router, outbox, client
  self.framer = framer.new(broker.settings.max_packet_bytes)
  self.max_bytes, self.work, self.deadline_ms = math.maxinteger, 0, clock() + CONNECT_MS
  return setmetatable(self, Session)
end

-- ---- disconnection

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
  local ok, allowed = self.broker:call(self.client, "onpublish", onpublish, self.client, message.topic, message.payload, message.retain)
  return ok and allowed ~= false
end

local function publish_will(self, will)
  if not is_allowed(self, will) then return end
  self.router:publish(will, self)
  self.router:flush()
end

-- The will is published in a separate cosocket, since onpublish may block: this may run in the timer or while a killed activity is closed.
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

--- End the session from the broker's side: an MQTT 5 client gets the reason, and the will is published.
function Session:stop(code, text)
  if self.left then return end
  self.deadline_ms = clock() + CLOSE_MS
  self.outbox:finish(fitting(self, code, text))
  leave(self)
end

--- End the session after the connection was closed. word: the error of the socket.
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

--- End the session when it is overdue: without a CONNECT, or without packets. Returns true when the connection must be closed immediately.
function Session:check(now_ms)
  if self.outbox:is_stuck(now_ms) then
    self:ended("timeout")
    return true
  end
  if not self.deadline_ms or now_ms < self.deadline_ms then return false end
  if self.left then return true end
  refuse(self, refusal.KEEP_ALIVE, "no packet was received within the keep-alive time")
  return false
end

-- ---- CONNECT

local function check_connect(request)
  if request.properties.authenticationmethod then
    refusal.raise(refusal.AUTHENTICATION_METHOD, "this broker supports only user name and password")
  end
  if request.id == "" and request.version < 5 and not request.clean then
    refusal.raise(refusal.CLIENT_IDENTIFIER, "a client without an identifier must request a clean session")
  end
end

local function authenticate(self, request)
  local auth = self.broker.settings.auth
  if not auth then return end
  if auth == true then return identity.login(self, request) end
  local ok, accepted = self.broker:call(self.client, "auth", auth, self.client, request.username, request.password)
  if not ok then refusal.raise(refusal.UNAVAILABLE, "the authentication of the broker failed") end
  if accepted then return end
  if request.username then refusal.raise(refusal.CREDENTIALS, "user name or password is wrong") end
  refusal.raise(refusal.NOT_AUTHORIZED, "the client must send user name and password")
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
  self.keepalive_ms = request.keepalive_s > 0 and request.keepalive_s * KEEPALIVE_MS_PER_S or nil
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
  if self.left then return identity.leave(self) end -- the connection was closed during the authentication
  identity.check_takeover(self, self.router.clients[self.id])
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
    local allowed = not self.identity or identity.may_subscribe(self, entry.filter)
    codes[i] = allowed and self.router:subscribe(self, entry) or refusal.NOT_AUTHORIZED
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
    refusal.protocol_error("DISCONNECT sets a session expiry interval, but CONNECT did not")
  end
  if code == refusal.NORMAL then self.will = nil end
  self.outbox:finish("")
  self.deadline_ms = clock() + CLOSE_MS
  leave(self)
end}

local function handle(self, header, body)
  local kind = header >> 4
  local entry = handlers[kind]
  if not entry then refusal.protocol_error("unexpected packet type " .. kind) end
  if entry[1] and header & 0x0F ~= entry[1] then refusal.malformed("wrong flags in the first byte of a packet") end
  if not self.connected then return connect(self, body) end
  self.deadline_ms = nil -- set again after the packet: a callback may block
  return entry[2](self, body, header)
end

-- Check the first byte: other protocols, such as HTTP, would look like an incomplete packet that never ends.
local function check_first(self, data)
  if self.begun or data == "" then return end
  self.begun = true
  if byte(data) ~= CONNECT << 4 then refusal.protocol_error("the first packet is not a CONNECT") end
end

local function handle_packets(self)
  while not self.left and self.work < MAX_WORK do
    local header, body = self.framer:next()
    if not header then return end
    self.work = self.work + 1 + (#body >> BODY_BITS)
    handle(self, header, body)
    if not self.left then self.deadline_ms = self.keepalive_ms and clock() + self.keepalive_ms end
  end
end

-- Call a function; an error ends this session and nothing else.
local function try(self, f, ...)
  local ok, fault = pcall(f, self, ...)
  if ok then return end
  local code, text, is_refusal = refusal.of(fault)
  if not is_refusal then trace("mqttbroker: " .. tostring(fault)) end
  refuse(self, code, text)
end

local function add(self, data)
  check_first(self, data)
  self.framer:add(data)
end

--- Handle data that was read. Returns true when the caller must let other activities run and then call `process` for the rest.
function Session:receive(data)
  if self.left then return false end
  try(self, add, data)
  return self:process()
end

--- Handle packets that were received. Returns as `receive`.
function Session:process()
  try(self, handle_packets)
  self.outbox:flush()
  self.router:flush()
  if self.work < MAX_WORK then return false end
  self.work = 0
  return not self.left
end

-- ---- delivery, called by the router

function Session:deliver(message, subscription)
  local bytes = message:packet(self.version, subscription.identifiers, subscription.retainaspublished)
  if #bytes <= self.max_bytes then self.outbox:put(bytes) end
end

function Session:flush()
  self.outbox:flush()
end

return {new = new}
