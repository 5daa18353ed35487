-- The packets that the broker sends, PUBLISH aside (MQTT 3.1.1 §3, MQTT 5 §3).

local fields = require "mqttbroker.fields"
local packet = require "mqttbroker.message".packet
local properties = require "mqttbroker.properties"

local char, concat, pack = string.char, table.concat, string.pack

local CONNACK <const>, SUBACK <const>, UNSUBACK <const>, DISCONNECT <const> = 0x20, 0x90, 0xB0, 0xE0
local REFUSED_3 <const> = 0x80

local encode = {PINGRESP = "\xD0\0"}

local function block(values)
  local bytes = properties.pack(values)
  return fields.pack_varint(#bytes) .. bytes
end

--- CONNACK without a session. code: in 3.1.1 the return code, in 5 the reason code. values: the properties.
function encode.connack(version, code, values)
  return packet(CONNACK, char(0, code) .. (version < 5 and "" or block(values)))
end

--- DISCONNECT, for MQTT 5 only. text: the reason, for who reads the logs of the client.
function encode.disconnect(code, text)
  return packet(DISCONNECT, char(code) .. block {reasonstring = text})
end

local function bytes_of(codes)
  local bytes = {}
  for i, code in ipairs(codes) do bytes[i] = char(code) end
  return concat(bytes)
end

--- SUBACK. codes: the reason codes of MQTT 5; 3.1.1 knows but one refusal.
function encode.suback(version, id, codes)
  if version >= 5 then return packet(SUBACK, pack(">I2B", id, 0) .. bytes_of(codes)) end
  for i, code in ipairs(codes) do codes[i] = math.min(code, REFUSED_3) end
  return packet(SUBACK, pack(">I2", id) .. bytes_of(codes))
end

--- UNSUBACK; in 3.1.1 it has no codes.
function encode.unsuback(version, id, codes)
  if version < 5 then return packet(UNSUBACK, pack(">I2", id)) end
  return packet(UNSUBACK, pack(">I2B", id, 0) .. bytes_of(codes))
end

return encode
