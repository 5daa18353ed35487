-- Properties (MQTT 5 §2.2.2). Their names are those of the specification in lower case.

local fields = require "mqttbroker.fields"
local refusal = require "mqttbroker.refusal"

local char, concat, find, format, gmatch = string.char, table.concat, string.find, string.format, string.gmatch
local pack, sort, sub = string.pack, table.sort, string.sub

local EMPTY <const> = "\0"
local MAX_PROPERTIES <const> = 1000 -- of a packet: one may have five bytes, and costs a microsecond
local USER <const> = 0x26

local function flag(body, at)
  local value, after = fields.byte(body, at)
  if value > 1 then refusal.protocol_error("a property that is 0 or 1 is " .. value) end
  return value, after
end

local function positive(read)
  return function(body, at)
    local value, after = read(body, at)
    if value == 0 then refusal.protocol_error("a property that must not be 0 is 0") end
    return value, after
  end
end

local function topic(body, at)
  local value, after = fields.text(body, at)
  if value == "" or find(value, "[+#]") then refusal.protocol_error("the response topic has a wildcard, or is empty") end
  return value, after
end

local function pair(body, at)
  local name, from = fields.text(body, at)
  local value, after = fields.text(body, from)
  return {name, value}, after
end

local function packs(form)
  return function(value) return pack(form, value) end
end

-- Identifier -> name, how it is read, how it is written, the packets of a client that may have it.
local KINDS <const> = {
  [0x01] = {"payloadformatindicator", flag, char, "publish will"},
  [0x02] = {"messageexpiryinterval", fields.u32, packs ">I4", "publish will"},
  [0x03] = {"contenttype", fields.text, fields.pack_binary, "publish will"},
  [0x08] = {"responsetopic", topic, fields.pack_binary, "publish will"},
  [0x09] = {"correlationdata", fields.binary, fields.pack_binary, "publish will"},
  [0x0B] = {"subscriptionidentifier", positive(fields.varint), fields.pack_varint, "subscribe"},
  [0x11] = {"sessionexpiryinterval", fields.u32, packs ">I4", "connect disconnect"},
  [0x12] = {"assignedclientidentifier", fields.text, fields.pack_binary, ""},
  [0x13] = {"serverkeepalive", fields.u16, packs ">I2", ""},
  [0x15] = {"authenticationmethod", fields.text, fields.pack_binary, "connect"},
  [0x16] = {"authenticationdata", fields.binary, fields.pack_binary, "connect"},
  [0x17] = {"requestprobleminformation", flag, char, "connect"},
  [0x18] = {"willdelayinterval", fields.u32, packs ">I4", "will"},
  [0x19] = {"requestresponseinformation", flag, char, "connect"},
  [0x1A] = {"responseinformation", fields.text, fields.pack_binary, ""},
  [0x1C] = {"serverreference", fields.text, fields.pack_binary, ""},
  [0x1F] = {"reasonstring", fields.text, fields.pack_binary, "disconnect"},
  [0x21] = {"receivemaximum", positive(fields.u16), packs ">I2", "connect"},
  [0x22] = {"topicaliasmaximum", fields.u16, packs ">I2", "connect"},
  [0x23] = {"topicalias", fields.u16, packs ">I2", "publish"},
  [0x24] = {"maximumqos", flag, char, ""},
  [0x25] = {"retainavailable", flag, char, ""},
  [USER] = {"user", pair, nil, "connect publish will subscribe unsubscribe disconnect"},
  [0x27] = {"maximumpacketsize", positive(fields.u32), packs ">I4", "connect"},
  [0x28] = {"wildcardsubscriptionavailable", flag, char, ""},
  [0x29] = {"subscriptionidentifieravailable", flag, char, ""},
  [0x2A] = {"sharedsubscriptionavailable", flag, char, ""},
}

local IDS <const>, ORDER <const>, ALLOWED <const> = {}, {}, {}
for id, kind in pairs(KINDS) do
  IDS[kind[1]], ORDER[#ORDER + 1] = id, id
  for packet in gmatch(kind[4], "%a+") do ALLOWED[packet .. id] = true end
end
sort(ORDER)

-- What goes with a message to its subscribers.
local FORWARDED <const> = {[0x01] = true, [0x02] = true, [0x03] = true, [0x08] = true, [0x09] = true, [USER] = true}

local function add(properties, id, name, value)
  if id == USER then
    properties.user[#properties.user + 1] = value
  elseif properties[name] then
    refusal.protocol_error("the property " .. name .. " is there twice")
  else
    properties[name] = value
  end
end

local function read(body, at, packet)
  local id, from = fields.byte(body, at)
  local kind = KINDS[id]
  if not kind then refusal.malformed(format("there is no property 0x%02x", id)) end
  if not ALLOWED[packet .. id] then refusal.protocol_error("a " .. packet .. " packet has no property " .. kind[1]) end
  local value, after = kind[2](body, from)
  return id, kind[1], value, after
end

local properties = {EMPTY = EMPTY}

--- The properties at a position of a packet, and the position behind them. packet: "connect", "will", "publish" …
-- The table has the values by name, `user` as a list of {name, value}, and `forwarded`: the bytes that go with the message.
function properties.read(body, at, packet)
  local size, from = fields.varint(body, at)
  local found, kept, after, count = {user = {}}, {}, from + size, 0
  if after - 1 > #body then refusal.malformed("the packet ends inside its properties") end
  while from < after do
    count = count + 1
    if count > MAX_PROPERTIES then refusal.raise(refusal.QUOTA, "the packet has more than " .. MAX_PROPERTIES .. " properties") end
    local id, name, value, behind = read(body, from, packet)
    add(found, id, name, value)
    if FORWARDED[id] then kept[#kept + 1] = sub(body, from, behind - 1) end
    from = behind
  end
  if from ~= after then refusal.malformed("a property is longer than the properties") end
  found.forwarded = concat(kept)
  return found, after
end

local function user_property(name, value)
  return char(USER) .. fields.pack_binary(tostring(name)) .. fields.pack_binary(tostring(value))
end

--- The bytes of a table of properties of the specification, without their length.
function properties.pack(values)
  local parts = {}
  for _, id in ipairs(ORDER) do
    local kind = KINDS[id]
    local value = id ~= USER and values[kind[1]]
    if value then parts[#parts + 1] = char(id) .. kind[3](value) end
  end
  return concat(parts)
end

--- The bytes of the properties that an application gives a message. A name that the specification has not is a user property.
function properties.pack_message(values)
  local kept, parts = {}, {}
  for name, value in pairs(values) do
    local id = IDS[name]
    if not id or id == USER then
      parts[#parts + 1] = user_property(name, value)
    elseif FORWARDED[id] then
      kept[name] = value
    end
  end
  return properties.pack(kept) .. concat(parts)
end

--- What an application gets: one table of names. User properties with a name of the specification are left out, so that nobody
-- can fake those.
function properties.plain(found)
  local plain = {}
  for _, entry in ipairs(found.user) do
    if not IDS[entry[1]] then plain[entry[1]] = entry[2] end
  end
  for name, value in pairs(found) do
    if IDS[name] and IDS[name] ~= USER then plain[name] = value end
  end
  return plain
end

return properties
