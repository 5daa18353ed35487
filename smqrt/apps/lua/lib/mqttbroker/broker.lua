-- A running broker: its listeners, its sessions, and the calls into the application.

local client = require "mqttbroker.client"
local identity = require "mqttbroker.identity"
local listener = require "mqttbroker.listener"
local refusal = require "mqttbroker.refusal"
local router = require "mqttbroker.router"
local session = require "mqttbroker.session"

local clock, pcall = ba.clock, pcall

local CHECK_MS <const> = 250 -- interval of `check_all`, and so the precision of deadlines
local YIELD_MS <const> = 1   -- in which other activities run

local Broker = {}
Broker.__index = Broker

-- ---- calls into the application

--- Call onerror: etype "mqtt" with a reason code, "sock" with a socket error, "callback" with the text of an error.
function Broker:report(about, etype, status, text)
  local onerror = self.settings.onerror
  local ok, fault = true, nil
  if onerror then ok, fault = pcall(onerror, about, etype, status, text) end
  if not ok then trace("mqttbroker: onerror failed: " .. tostring(fault)) end
  if not onerror and etype == "callback" then trace("mqttbroker: " .. status) end
end

--- Call a function of the application; return whether it succeeded, and its result. name: as in the manual, for the error report.
function Broker:call(about, name, callback, ...)
  local ok, result = pcall(callback, ...)
  if not ok then self:report(about, "callback", name .. " failed: " .. tostring(result)) end
  return ok, result
end

-- ---- properties that clients receive

--- An identifier for a client without one.
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

-- ---- network clients

local function describe(sock, secure)
  local address, port = sock:peername()
  return {sock = sock, address = address, port = port, secure = secure}
end

local function read_all(client_session, sock)
  while true do
    local data, word = sock:read()
    if not data then return client_session:ended(word) end
    local has_more = client_session:receive(data)
    while has_more do
      listener.pause(sock, YIELD_MS)
      has_more = client_session:process()
    end
  end
end

local Entry = {__close = function(entry) -- also when the reading cosocket is killed
  entry.broker.session_count = entry.broker.session_count - 1
  entry.broker.sessions[entry.session] = nil
  entry.session:ended("socketclosed")
end}

local function serve(self, sock, secure)
  if not self.running then return end
  if self.session_count >= self.settings.max_clients then
    self.totals.refused = self.totals.refused + 1
    self:report(nil, "mqtt", refusal.QUOTA, "limit reached: maxClients (" .. self.settings.max_clients .. "); the connection is closed")
    return sock:close()
  end
  sock:setoption("tcp-nodelay", true)
  sock:setoption("keepalive", true)
  local box = listener.outbox(sock, self.totals)
  local client_session = session.new(self, box, describe(sock, secure))
  local entry <close> = setmetatable({broker = self, session = client_session}, Entry)
  self.sessions[client_session], self.session_count = sock, self.session_count + 1
  read_all(client_session, sock)
end

-- The keys of a set, as a list: the set may change during the iteration.
local function snapshot(set)
  local list = {}
  for key in pairs(set) do list[#list + 1] = key end
  return list
end

local function check_all(self)
  local now_ms = clock()
  for _, client_session in ipairs(snapshot(self.sessions)) do
    local sock = self.sessions[client_session]
    if sock and client_session:check(now_ms) then sock:close() end
  end
  if self.settings.auth == true then identity.recheck(self) end
  return self.running or next(self.sessions) ~= nil
end

-- ---- start and shutdown

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

--- A broker without listeners. settings: see options.lua.
local function make(settings)
  return setmetatable({
    settings = settings, router = router.new(settings.allow_wildcards), totals = {dropped = 0, refused = 0},
    sessions = {}, session_count = 0, locals = {}, sockets = {}, ports = {}, running = true,
  }, Broker)
end

--- Start a broker. Returns it, or nil and the error of the socket.
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
  for _, local_client in ipairs(snapshot(self.locals)) do local_client:stop(refusal.SHUTTING_DOWN) end
end

--- Shut down gracefully: MQTT 5 clients get a reason, and queued packets are written. Returns false when it was not running.
function Broker:shutdown()
  if not self.running then return false end
  self.running = false
  stop_listening(self)
  for _, client_session in ipairs(snapshot(self.sessions)) do client_session:stop(refusal.SHUTTING_DOWN, "the broker is shutting down") end
  stop_locals(self)
  return true
end

--- Close all sockets immediately. Returns false when it was not running.
function Broker:close()
  local was_running = self.running
  self.running = false
  stop_listening(self)
  for _, sock in pairs(self.sessions) do sock:close() end
  stop_locals(self)
  return was_running
end

-- {port, address, secure} of each open listener.
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

--- A client in this process, with the methods of mqttc: createClient([onstatus] [,onpub] [,opt]).
function Broker:createClient(onstatus, onpub, options)
  if type(onpub) == "table" then onpub, options = nil, onpub end
  local local_client, fault = client.new(self, onstatus, onpub, options or {})
  if not local_client then error(fault, 2) end
  return local_client
end

return {make = make, start = start}
