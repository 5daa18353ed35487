-- The packets that a client sends (MQTT 3.1.1 §3, MQTT 5 §3), read strictly.

local fields = require "mqttbroker.fields"
local message = require "mqttbroker.message"
local properties = require "mqttbroker.properties"
local refusal = require "mqttbroker.refusal"
local topics = require "mqttbroker.topics"

local byte, match, sub = string.byte, string.match, string.sub

local NONE <const> = {user = {}, forwarded = ""}
local MAX_FILTERS <const> = 1000 -- of a packet: more would take long before others have their turn

local decode = {}

local function read_properties(body, at, packet, version)
  if version < 5 then return NONE, at end
  if byte(body, at) == 0 then return NONE, at + 1 end
  return properties.read(body, at, packet)
end

local function new_message(topic, payload, retain, found)
  return message.new(topic, payload, retain, found.forwarded, function() return properties.plain(found) end)
end

local function ended(body, at)
  if at <= #body then refusal.malformed("the packet has bytes behind its end") end
end

local function check_count(filters)
  if #filters == MAX_FILTERS then refusal.raise(refusal.QUOTA, "the packet has more than " .. MAX_FILTERS .. " topic filters") end
end

local function packet_identifier(body)
  local id, at = fields.u16(body, 1)
  if id == 0 then refusal.protocol_error("the packet identifier is 0") end
  return id, at
end

-- ---- CONNECT

local function protocol(body)
  local name, at = fields.text(body, 1)
  local level, after = fields.byte(body, at)
  if name == "MQTT" and (level == 4 or level == 5) then return level, after end
  refusal.raise(refusal.VERSION, "this broker speaks MQTT 3.1.1 and 5")
end

local function check_flags(flags)
  if flags & 0x01 ~= 0 then refusal.malformed("a reserved flag of CONNECT is set") end
  if flags & 0x18 == 0x18 then refusal.malformed("the will has QoS 3") end
  if flags & 0x04 == 0 and flags & 0x38 ~= 0 then refusal.malformed("CONNECT has flags of a will but no will") end
end

local function check_will(flags, version)
  if version < 5 then return end -- its subscribers get QoS 0 at any rate
  if flags & 0x18 ~= 0 then refusal.raise(refusal.QOS, "the will has another QoS than 0") end
  if flags & 0x20 ~= 0 then refusal.raise(refusal.RETAIN, "this broker retains no messages, the will neither") end
end

local function read_will(body, at, flags, version)
  local found, from = read_properties(body, at, "will", version)
  local topic, between = fields.text(body, from)
  local payload, after = fields.binary(body, between)
  if not topics.is_name(topic) then refusal.raise(refusal.TOPIC_NAME, "the topic of the will is empty or has a wildcard") end
  check_will(flags, version)
  return new_message(topic, payload, flags & 0x20 ~= 0, found), after
end

local function read_credentials(body, at, flags, connect)
  if flags & 0x80 ~= 0 then connect.username, at = fields.text(body, at) end
  if flags & 0x40 ~= 0 then connect.password, at = fields.binary(body, at) end
  if connect.version == 4 and flags & 0xC0 == 0x40 then refusal.malformed("CONNECT has a password but no user name") end
  return at
end

--- The version in whose way a CONNECT packet is to be answered when it is refused; nil when it is of no MQTT.
function decode.version(body)
  local level = match(body, "^\0\4MQTT(.)") or match(body, "^\0\6MQIsdp(.)")
  return level and (byte(level) < 5 and 4 or 5)
end

--- {version, clean, keepalive_s, properties, id, will, username, password}
function decode.connect(body)
  local version, at = protocol(body)
  local connect, flags = {version = version}, nil
  flags, at = fields.byte(body, at)
  check_flags(flags)
  connect.clean = flags & 0x02 ~= 0
  connect.keepalive_s, at = fields.u16(body, at)
  connect.properties, at = read_properties(body, at, "connect", version)
  connect.id, at = fields.text(body, at)
  if flags & 0x04 ~= 0 then connect.will, at = read_will(body, at, flags, version) end
  ended(body, read_credentials(body, at, flags, connect))
  return connect
end

-- ---- PUBLISH

local function check_header(header, version)
  if header & 0x06 == 0x06 then refusal.malformed("PUBLISH has QoS 3") end
  if header & 0x06 ~= 0 then refusal.raise(refusal.QOS, "this broker takes QoS 0 only") end
  if header & 0x08 ~= 0 then refusal.malformed("PUBLISH with QoS 0 is marked as sent again") end
  if version >= 5 and header & 0x01 ~= 0 then refusal.raise(refusal.RETAIN, "this broker retains no messages") end
end

--- A message. That of a 3.1.1 client, who was not told that nothing is retained, may have the mark.
function decode.publish(header, body, version)
  check_header(header, version)
  local topic, at = fields.text(body, 1)
  local found, after = read_properties(body, at, "publish", version)
  if found.topicalias then refusal.raise(refusal.TOPIC_ALIAS, "this broker takes no topic aliases") end
  if not topics.is_name(topic) then refusal.raise(refusal.TOPIC_NAME, "the topic is empty or has a wildcard") end
  return new_message(topic, sub(body, after), header & 0x01 ~= 0, found)
end

-- ---- SUBSCRIBE, UNSUBSCRIBE

local function read_options(value, version)
  if value & 0x03 == 3 or value & (version < 5 and 0xFC or 0xC0) ~= 0 then refusal.malformed("wrong options of a subscription") end
  if value & 0x30 == 0x30 then refusal.protocol_error("retain handling is 3") end
  return {nolocal = value & 0x04 ~= 0, retainaspublished = value & 0x08 ~= 0}
end

--- The packet identifier, and a list of {filter, nolocal, retainaspublished, id}.
function decode.subscribe(body, version)
  local id, at = packet_identifier(body)
  local found, wanted, options = nil, {}, nil
  found, at = read_properties(body, at, "subscribe", version)
  if at > #body then refusal.protocol_error("SUBSCRIBE has no topic filter") end
  while at <= #body do
    local filter
    check_count(wanted)
    filter, at = fields.text(body, at)
    options, at = fields.byte(body, at)
    local entry = read_options(options, version)
    entry.filter, entry.id = filter, found.subscriptionidentifier
    wanted[#wanted + 1] = entry
  end
  return id, wanted
end

--- The packet identifier and the list of filters.
function decode.unsubscribe(body, version)
  local id, at = packet_identifier(body)
  local filters, _ = {}, nil
  _, at = read_properties(body, at, "unsubscribe", version)
  if at > #body then refusal.protocol_error("UNSUBSCRIBE has no topic filter") end
  while at <= #body do
    check_count(filters)
    filters[#filters + 1], at = fields.text(body, at)
  end
  return id, filters
end

-- ---- DISCONNECT

--- The reason code and the properties.
function decode.disconnect(body, version)
  if body == "" then return refusal.NORMAL, NONE end
  if version < 5 then refusal.malformed("DISCONNECT has a body") end
  local code, at = fields.byte(body, 1)
  if at > #body then return code, NONE end
  local found, after = read_properties(body, at, "disconnect", version)
  ended(body, after)
  return code, found
end

return decode
