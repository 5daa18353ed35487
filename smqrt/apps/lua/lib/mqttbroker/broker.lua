-- A running broker: its listeners, and the calls into the application. Python serves the network clients.

local client = require "mqttbroker.client"
local listener = require "mqttbroker.listener"
local python = require "mqttbroker.python"

local py, ref = python.py, python.ref
local cpu_clock, pcall, rawset, setmetatable, sub, unpack = os.clock, pcall, rawset, setmetatable, string.sub, string.unpack

local SHUTTING_DOWN <const> = 0x8B
local HEADER_BYTES <const> = 15    -- of a Publish frame of SMQ
local FRAMES_PER_CLOCK <const> = 8 -- frames that are handled between two reads of the clock
local TIME_SLICE_S <const> = 0.004 -- of CPU time, before other activities run

local Broker = {}
Broker.__index = Broker

local brokers = setmetatable({}, {__mode = "v"}) -- number in Python -> broker

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

-- ---- network clients, which Python identifies by numbers

local number_of = setmetatable({}, {__mode = "k"}) -- client table -> number

local client_meta = {
  __index = function(self, key)
    if key ~= "sock" then return nil end
    local socket = python.socket(number_of[self])
    rawset(self, "sock", socket)
    return socket
  end,
}

-- The table that callbacks get for a client, the same one while it is connected; nil without a client.
local function client_of(self, number)
  if not number then return nil end
  local known = self.clients[number]
  if not known then
    known = setmetatable({}, client_meta)
    self.clients[number], number_of[known] = known, number
  end
  if not known.version or self.settings.auth == true and not known.user then
    known.address, known.port, known.secure, known.version, known.clientidentifier, known.username, known.user = py.describe(number)
  end
  return known
end

-- The functions that Python calls, with the numbers of a broker and a client.
local calls = {}

calls.report = ref(function(broker, number, etype, status, text)
  local self = brokers[broker]
  if self then self:report(client_of(self, number), etype, status, text) end
end)

calls.left = ref(function(broker, number)
  local self = brokers[broker]
  local known = self and self.clients[number]
  if not known then return end
  self.clients[number] = nil
  local socket = rawget(known, "sock")
  if socket then python.forget(socket) end
end)

-- Returns nil when `auth` has failed.
calls.auth = ref(function(broker, number, username, password)
  local self = brokers[broker]
  if not self then return end -- the application has dropped it
  local known = client_of(self, number)
  local ok, accepted = self:call(known, "auth", self.settings.auth, known, username, password)
  if ok then return accepted and true or false end
end)

local function is_permitted(self, known, topic, payload, retain)
  local onpublish = self.settings.onpublish
  local ok, allowed = self:call(known, "onpublish", onpublish, known, topic, payload, retain)
  return ok and allowed ~= false
end

calls.permit = ref(function(broker, number, topic, retain, payload)
  local self = brokers[broker]
  return self and is_permitted(self, client_of(self, number), topic, payload, retain)
end)

-- Returns true when all messages of a batch of Publish frames are permitted, otherwise the frames of those that are.
calls.permit_all = ref(function(broker, number, topic, retain, batch)
  local self = brokers[broker]
  if not self then return "" end
  local known, permitted, bytes = client_of(self, number), {}, 0
  local at, size, count, until_s = 1, #batch, 0, cpu_clock() + TIME_SLICE_S
  while at <= size do
    count = count + 1
    if count % FRAMES_PER_CLOCK == 0 and cpu_clock() >= until_s then
      python.pause()
      until_s = cpu_clock() + TIME_SLICE_S
    end
    local last = at + unpack(">I2", batch, at) - 1
    if is_permitted(self, known, topic, sub(batch, at + HEADER_BYTES, last), retain) then
      permitted[#permitted + 1], bytes = sub(batch, at, last), bytes + last - at + 1
    end
    at = last + 1
  end
  return bytes == size or table.concat(permitted)
end)

-- ---- start and shutdown

local function open(self, entry)
  local function report(word) self:report(nil, "sock", word) end
  local function ended() if self.running then self:close() end end
  return listener.open(self.settings.address, entry.port, entry.shark, self.number, report, ended)
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

local function make(settings)
  local auth, onpublish = settings.auth, settings.onpublish
  local number = py.new(
    settings.max_packet_bytes, settings.max_clients, settings.allow_wildcards, auth == true,
    settings.onerror and calls.report or 0, calls.left, type(auth) == "function" and calls.auth or 0, onpublish and calls.permit or 0, onpublish and calls.permit_all or 0
  )
  local self = setmetatable({
    settings = settings, number = number, totals = {dropped = 0}, clients = {}, locals = {}, sockets = {}, ports = {}, running = true,
  }, Broker)
  brokers[number] = self
  return self
end

--- Start a broker. settings: see options.lua. Returns it, or nil and the error of the socket.
local function start(settings)
  local self = make(settings)
  local ok, fault = listen(self)
  if ok then return self end
  self:close()
  return nil, fault
end

local function stop_locals(self)
  local list = {} -- the set changes during the iteration
  for local_client in pairs(self.locals) do list[#list + 1] = local_client end
  for _, local_client in ipairs(list) do local_client:stop(SHUTTING_DOWN) end
end

--- Shut down gracefully: MQTT 5 clients get a reason, and queued packets are written. Returns false when it was not running.
function Broker:shutdown()
  if not self.running then return false end
  self.running = false
  stop_listening(self)
  stop_locals(self)
  py.stop(self.number)
  return true
end

--- Close all sockets immediately. Returns false when it was not running.
function Broker:close()
  local was_running = self.running
  self.running = false
  stop_listening(self)
  stop_locals(self)
  py.close(self.number)
  return was_running
end

Broker.__gc = function(self) py.release(self.number) end

--- The number of connections, including those of clients that are not accepted yet.
function Broker:connections() return (select(4, py.counts(self.number))) end

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
  local clients, dropped, refused = py.counts(self.number)
  return {
    running = self.running,
    clients = clients,
    port = self.ports[1],
    ports = {table.unpack(self.ports)},
    listeners = listeners(self),
    maxPacketSize = self.settings.max_packet_bytes,
    dropped = dropped + self.totals.dropped,
    refused = refused,
  }
end

--- A client in this process, with the methods of mqttc: createClient([onstatus] [,onpub] [,opt]).
function Broker:createClient(onstatus, onpub, options)
  if type(onpub) == "table" then onpub, options = nil, onpub end
  local local_client, fault = client.new(self, onstatus, onpub, options or {})
  if not local_client then error(fault, 2) end
  return local_client
end

return {start = start}
