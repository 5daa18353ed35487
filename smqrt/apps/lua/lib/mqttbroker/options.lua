-- Options of a broker: checks, conversions and defaults.

local MAX_PACKET_BYTES <const> = 262144
local LARGEST <const> = 268435460 -- of MQTT, whose lengths have four bytes
local SMALLEST <const> = 128      -- large enough for a CONNECT of usual clients
local MAX_CLIENTS <const> = 10000
local PORT <const>, TLS_PORT <const> = 1883, 8883

-- Each row of CHECKS: name, test, expected value, conversion between numbers and text as in Lua's own functions.

local function is(kind)
  return function(value) return type(value) == kind end, kind
end

local function text(value) return type(value) == "number" and tostring(value) or value end

local function whole(value) return math.tointeger(tonumber(value)) or value end

local function between(low, high, what)
  return function(value) return math.type(value) == "integer" and low <= value and value <= high end, what, whole
end

local function given(value)
  return type(value) == "userdata" or type(value) == "table"
end

local CHECKS <const> = {
  {"address", function(value) return type(value) == "string" end, "string", text},
  {"port", between(0, 65535, "port number from 0 to 65535")},
  {"shark", given, "TLS object"},
  {"plain", is "boolean"},
  {"plainPort", between(0, 65535, "port number from 0 to 65535")},
  {"maxPacketSize", between(SMALLEST, LARGEST, "number of bytes from 128 to 268435460")},
  {"maxClients", between(1, math.maxinteger, "number above 0")},
  {"auth", function(value) return type(value) == "function" or value == true end, "function or true"},
  {"onpublish", is "function"},
  {"onerror", is "function"},
  {"allowWildcards", is "boolean"},
}

local FAULT <const> = "bad argument #2 to 'create' (%s: %s expected, got %s)"

local function shown(value)
  return type(value) == "number" and value or type(value)
end

-- Convert the options; return the error of the first invalid one.
local function fault_of(op)
  for _, check in ipairs(CHECKS) do
    local name, accepts, expected, convert = table.unpack(check)
    local value = op[name]
    if convert then value = convert(value) end
    op[name] = value
    if value ~= nil and not accepts(value) then
      return FAULT:format(name, expected, shown(value))
    end
  end
end

-- The listeners as {port, shark}; the first one is on `port`.
local function listeners(op)
  if not op.shark then return {{port = op.port or PORT}} end
  local list = {{port = op.port or TLS_PORT, shark = op.shark}}
  if op.plain then list[2] = {port = op.plainPort or PORT} end
  return list
end

--- The settings from the arguments of create([port] [,op]), or nil and the error.
local function parse(port, op)
  if type(port) == "table" then port, op = nil, port end
  if op ~= nil and type(op) ~= "table" then return nil, FAULT:format("options", "table", type(op)) end
  op = setmetatable({port = port}, {__index = op})
  local fault = fault_of(op)
  if fault then return nil, fault end
  return {
    address = op.address,
    listeners = listeners(op),
    max_packet_bytes = op.maxPacketSize or MAX_PACKET_BYTES,
    max_clients = op.maxClients or MAX_CLIENTS,
    auth = op.auth, onpublish = op.onpublish, onerror = op.onerror,
    allow_wildcards = op.allowWildcards ~= false,
  }
end

return {parse = parse}
