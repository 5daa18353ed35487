-- The data types of PUBLISH packets (MQTT 5 §1.5). Readers take a body and a position. They return the value and the position after
-- it, or raise a refusal for truncated or malformed data.

local refusal = require "mqttbroker.refusal"

local byte, char, find, pack, sub = string.byte, string.char, string.find, string.pack, string.sub
local utf8_length = utf8.len

local MAX_LENGTH_BYTES <const> = 4

local fields = {}

function fields.text(body, at)
  local high, low = byte(body, at, at + 1)
  local from = at + 2
  local after = low and from + (high << 8 | low)
  if not after or after - 1 > #body then refusal.malformed("the packet ends inside a field") end
  local value = sub(body, from, after - 1)
  if not utf8_length(value) or find(value, "\0", 1, true) then
    refusal.malformed("a string is not UTF-8, or has the character NUL")
  end
  return value, after
end

--- A variable byte integer, or nil when `data` ends inside it.
function fields.length(data, at)
  local value, shift = 0, 0
  for i = at, at + MAX_LENGTH_BYTES - 1 do
    local part = byte(data, i)
    if not part then return nil end
    value, shift = value | (part & 0x7F) << shift, shift + 7
    if part < 0x80 then return value, i + 1 end
  end
  refusal.malformed("a length has more than four bytes")
end

--- The variable byte integer of a number.
function fields.pack_varint(value)
  if value < 0x80 then return char(value) end
  return char(value & 0x7F | 0x80) .. fields.pack_varint(value >> 7)
end

--- A string, preceded by its length.
function fields.pack_binary(value)
  return pack(">s2", value)
end

return fields
