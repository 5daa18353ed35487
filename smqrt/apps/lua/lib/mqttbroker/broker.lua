-- A running broker: its listeners, its sessions, and the calls into the application.

local client = require "mqttbroker.client"
local identity = require "mqttbroker.identity"
local listener = require "mqttbroker.listener"
local refusal = require "mqttbroker.refusal"
local router = require "mqttbroker.router"
local session = require "mqttbroker.session"

local clock, pcall = ba.clock, pcall

local CHECK_MS <const> = 250 -- how exact deadlines are
local REST_MS <const> = 1    -- in which others have a turn

local Broker = {}
Broker.__index = Broker

-- ---- calls into the application

--- Tells onerror what happened: etype "mqtt" with a reason code, "sock" with a socket error, "callback" with the text of an error.
function Broker:report(about, etype, status, text)
  local onerror = self.settings.onerror
  local ok, fault = true, nil
  if onerror then ok, fault = pcall(onerror, about, etype, status, text) end
  if not ok then trace("mqttbroker: onerror failed: " .. tostring(fault)) end
  if not onerror and etype == "callback" then trace("mqttbroker: " .. status) end
end

--- Calls a function of the application, by the name that it has in the manual: whether it returned, and what.
function Broker:ask(about, name, callback, ...)
  local ok, answer = pcall(callback, ...)
  if not ok then self:report(about, "callback", name .. " failed: " .. tostring(answer)) end
  return ok, answer
end

-- ---- properties that clients receive

--- An identifier for a client that has none.
function Broker.random_identifier()
  return "auto-" .. ba.rndbs(8):gsub(".", function(c) return ("%02x"):format(c:byte()) end)
end

--- The properties of a CONNACK that are the same for all clients.
function Broker:capabilities()
  return {
    maximumpacketsize = self.settings.max_packet_bytes,
    maximumqos = 0,
    retainavailable = 0,
    sharedsubscriptionavailable = 0,
    wildcardsubscriptionavailable = not self.settings.allow_wildcards and 0 or nil,
  }
end

-- ---- clients of the network

local function describe(sock, secure)
  local address, port = sock:peername()
  return {sock = sock, address = address, port = port, secure = secure}
end

local function read_all(conversation, sock)
  while true do
    local data, word = sock:read()
    if not data then return conversation:ended(word) end
    local busy = conversation:receive(data)
    while busy do
      listener.rest(sock, REST_MS)
      busy = conversation:go_on()
    end
  end
end

local Entry = {__close = function(entry) -- also when the reader is killed
  entry.broker.session_count = entry.broker.session_count - 1
  entry.broker.sessions[entry.session] = nil
  entry.session:ended("socketclosed")
end}

local function is_full(self)
  if self.session_count < self.settings.max_clients then return false end
  self.totals.refused = self.totals.refused + 1
  self:report(nil, "mqtt", refusal.QUOTA, "there are maxClients connections: a further one is closed")
  return true
end

local function serve(self, sock, secure)
  if not self.running then return end
  if is_full(self) then return sock:close() end
  sock:setoption("tcp-nodelay", true)
  sock:setoption("keepalive", true)
  local box = listener.outbox(sock, self.totals)
  local conversation = session.new(self, box, describe(sock, secure))
  local entry <close> = setmetatable({broker = self, session = conversation}, Entry)
  self.sessions[conversation], self.session_count = sock, self.session_count + 1
  read_all(conversation, sock)
end

local function snapshot(set)
  local list = {}
  for key in pairs(set) do list[#list + 1] = key end
  return list
end

local function check_all(self)
  local now_ms = clock()
  for _, conversation in ipairs(snapshot(self.sessions)) do
    local sock = self.sessions[conversation]
    if sock and conversation:check(now_ms) then sock:close() end
  end
  if self.settings.auth == true then identity.look_again(self) end
  return self.running or next(self.sessions) ~= nil
end

-- ---- begin and end

local function open(self, entry)
  local function accepted(sock) return serve(self, sock, entry.shark ~= nil) end
  local function report(word) self:report(nil, "sock", word) end
  return listener.open(self.settings.address, entry.port, entry.shark, accepted, report)
end

local function listen(self)
  for i, entry in ipairs(self.settings.listeners) do
    local sock, fault = open(self, entry)
    if not sock then return nil, fault end
    self.sockets[i] = sock
    local _, port = sock:sockname()
    self.ports[i] = port
  end
  return true
end

local function stop_listening(self)
  for _, sock in ipairs(self.sockets) do sock:close() end
  self.sockets = {}
end

--- A broker that does not listen yet. settings: see options.lua.
local function make(settings)
  return setmetatable({
    settings = settings, router = router.new(settings.allow_wildcards), totals = {dropped = 0, refused = 0},
    sessions = {}, session_count = 0, locals = {}, sockets = {}, ports = {}, running = true,
  }, Broker)
end

--- Starts a broker. Returns it, or nil and the error of the socket.
local function start(settings)
  local self = make(settings)
  local ok, fault = listen(self)
  if not ok then
    stop_listening(self)
    return nil, fault
  end
  self.timer = ba.timer(function() return check_all(self) end)
  self.timer:set(CHECK_MS, true)
  return self
end

local function stop_locals(self)
  for _, here in ipairs(snapshot(self.locals)) do here:stop(refusal.SHUTTING_DOWN) end
end

--- Ends the broker in order: clients of MQTT 5 are notified, queued packets are written. False when it has ended already.
function Broker:shutdown()
  if not self.running then return false end
  self.running = false
  stop_listening(self)
  for _, conversation in ipairs(snapshot(self.sessions)) do conversation:stop(refusal.SHUTTING_DOWN, "the broker is shutting down") end
  stop_locals(self)
  return true
end

--- Ends the broker immediately. False when it has ended already, without clients left.
function Broker:close()
  local was_running = self.running
  self.running = false
  stop_listening(self)
  for _, sock in pairs(self.sessions) do sock:close() end
  stop_locals(self)
  return was_running
end

-- {port, address, secure} of each that is open.
local function listeners(self)
  local list = {}
  for i in ipairs(self.sockets) do
    local entry = self.settings.listeners[i]
    list[i] = {port = self.ports[i], address = self.settings.address, secure = entry.shark ~= nil}
  end
  return list
end

function Broker:status()
  return {
    running = self.running,
    clients = self.router.count,
    port = self.ports[1],
    ports = {table.unpack(self.ports)},
    listeners = listeners(self),
    maxPacketSize = self.settings.max_packet_bytes,
    dropped = self.totals.dropped,
    refused = self.totals.refused,
  }
end

--- A client inside this process, with the methods of mqttc: createClient([onstatus] [,onpub] [,opt]).
function Broker:createClient(onstatus, onpub, options)
  if type(onpub) == "table" then onpub, options = nil, onpub end
  local here, fault = client.new(self, onstatus, onpub, options or {})
  if not here then error(fault, 2) end
  return here
end

return {make = make, start = start}
