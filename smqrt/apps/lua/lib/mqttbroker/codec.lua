-- Codec of the broker's packets. PUBLISH is handled here, for speed; the codec in Python handles all other packets.

local core, py = ...

local fields = require "mqttbroker.fields"
local message = require "mqttbroker.message"
local refusal = require "mqttbroker.refusal"
local topics = require "mqttbroker.topics"

local byte, char, dump, load, sub = string.byte, string.char, core.table_codec.dump, core.table_codec.load, string.sub
local unpack = table.unpack

local CONNECT <const>, SUBSCRIBE <const>, UNSUBSCRIBE <const>, DISCONNECT <const> = 0x10, 0x82, 0xA2, 0xE0
local NO_LOCAL <const>, AS_PUBLISHED <const> = 0x04, 0x08
local NO_VALUES <const> = dump {}
local NUMBERS <const> = {payloadformatindicator = true, messageexpiryinterval = true} -- all other properties are texts

local function no_properties() return {} end

local codec = {PINGRESP = "\xD0\0"}

local function decoded(first, body, version)
  local packed, code, text = py.decode_packet(first, body, version)
  if not packed then refusal.raise(code, text) end
  return load(packed)
end

-- ---- CONNECT

local function check_will(will, version)
  if version < 5 then return end -- accepted and delivered with QoS 0: CONNACK of 3.1.1 has no code for these errors
  if will.qos ~= 0 then refusal.raise(refusal.QOS, "the will has a QoS other than 0") end
  if will.retain then refusal.raise(refusal.RETAIN, "this broker does not retain messages; remove the retain flag of the will") end
end

--- The protocol version of a CONNECT packet, which the response to an invalid one needs; nil when it is not MQTT.
function codec.version(body)
  local version = py.connect_version(body)
  return version ~= 0 and version or nil
end

--- {version, clean, keepalive_s, properties, id, will, username, password}
function codec.connect(body)
  local request = decoded(CONNECT, body, 0)
  local will = request.will
  if will then
    check_will(will, request.version)
    request.will = message.new(will.topic, will.payload, will.retain, will.forwarded, function() return will.properties end)
  end
  return request
end

-- ---- PUBLISH

local function check_header(header, version)
  if header & 0x06 == 0x06 then refusal.malformed("PUBLISH has QoS 3") end
  if header & 0x06 ~= 0 then refusal.raise(refusal.QOS, "this broker supports QoS 0 only") end
  if header & 0x08 ~= 0 then refusal.malformed("PUBLISH with QoS 0 has the flag DUP") end
  if version >= 5 and header & 0x01 ~= 0 then refusal.raise(refusal.RETAIN, "this broker does not retain messages") end
end

-- The properties of a message as bytes, the position after them, and a function that returns them as a table.
local function read_properties(body, at)
  local size, from = fields.length(body, at)
  if not size or from + size - 1 > #body then refusal.malformed("the packet ends inside its properties") end
  local found = sub(body, from, from + size - 1)
  local has_alias, code, text = py.has_alias(found)
  if has_alias == nil then refusal.raise(code, text) end
  if has_alias then refusal.raise(refusal.TOPIC_ALIAS, "this broker does not support topic aliases") end
  return found, from + size, function() return load(py.message_table(found)) end
end

--- The message of a PUBLISH packet. Clients of 3.1.1 may set the retain flag: their CONNACK does not announce that it is unsupported.
function codec.publish(header, body, version)
  check_header(header, version)
  local topic, at = fields.text(body, 1)
  local forwarded, properties = "", no_properties
  if version >= 5 then
    local first = byte(body, at)
    if first == 0 then at = at + 1 else forwarded, at, properties = read_properties(body, at) end
  end
  if not topics.is_name(topic) then refusal.raise(refusal.TOPIC_NAME, "the topic is empty or has a wildcard") end
  return message.new(topic, sub(body, at), header & 0x01 ~= 0, forwarded, properties)
end

-- ---- the other packets of clients

--- The packet identifier, and a list of {filter, nolocal, retainaspublished, id}.
function codec.subscribe(body, version)
  local packet, wanted = decoded(SUBSCRIBE, body, version), {}
  for i, filter in ipairs(packet.filters) do
    local options = packet.options[i]
    wanted[i] = {
      filter = filter, id = packet.subscription,
      nolocal = options & NO_LOCAL ~= 0, retainaspublished = options & AS_PUBLISHED ~= 0,
    }
  end
  return packet.id, wanted
end

--- The packet identifier and the list of filters.
function codec.unsubscribe(body, version)
  local packet = decoded(UNSUBSCRIBE, body, version)
  return packet.id, packet.filters
end

--- The reason code and the properties.
function codec.disconnect(body, version)
  local packet = decoded(DISCONNECT, body, version)
  return packet.code, packet.properties
end

-- ---- packets of the broker

--- CONNACK without a session. code: in 3.1.1 the return code, in 5 the reason code. values: the properties.
function codec.connack(version, code, values)
  return py.connack(version, code, values and dump(values) or NO_VALUES)
end

--- DISCONNECT, for MQTT 5 only. text: the reason, for the log of the client.
codec.disconnect_packet = py.disconnect

--- SUBACK. codes: the reason codes of MQTT 5; 3.1.1 has one code for all failures.
function codec.suback(version, id, codes)
  return py.suback(version, id, char(unpack(codes)))
end

--- UNSUBACK; in 3.1.1 it has no codes.
function codec.unsuback(version, id, codes)
  return py.unsuback(version, id, char(unpack(codes)))
end

--- The bytes of message properties; "" for an empty table.
function codec.pack_message(values)
  local given = {}
  for name, value in pairs(values) do given[name] = NUMBERS[name] and value or tostring(value) end
  return next(given) and py.pack_message(dump(given)) or ""
end

return codec
