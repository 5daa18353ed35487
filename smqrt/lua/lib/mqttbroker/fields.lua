-- The elements that packets are made of (MQTT 5 §1.5). Readers take the packet's body and a position, answer the value and the
-- position behind it, and refuse what is truncated or malformed.

local refusal = require "mqttbroker.refusal"

local byte, char, find, pack, sub, unpack = string.byte, string.char, string.find, string.pack, string.sub, string.unpack
local utf8_length = utf8.len

local MAX_LENGTH_BYTES <const> = 4

local fields = {}

local function need(body, last)
  if last > #body then refusal.malformed("the packet ends inside a field") end
end

function fields.byte(body, at)
  need(body, at)
  return byte(body, at), at + 1
end

function fields.u16(body, at)
  need(body, at + 1)
  return unpack(">I2", body, at)
end

function fields.u32(body, at)
  need(body, at + 3)
  return unpack(">I4", body, at)
end

function fields.binary(body, at)
  local size, from = fields.u16(body, at)
  need(body, from + size - 1)
  return sub(body, from, from + size - 1), from + size
end

--- Whether a string may be an MQTT text: UTF-8 without surrogates and without the character NUL.
function fields.is_text(value)
  return utf8_length(value) and not find(value, "\0", 1, true)
end

function fields.text(body, at)
  local value, after = fields.binary(body, at)
  if not fields.is_text(value) then refusal.malformed("a text is not UTF-8, or has the character NUL") end
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

function fields.varint(body, at)
  local value, after = fields.length(body, at)
  if not value then refusal.malformed("the packet ends inside a field") end
  return value, after
end

--- The variable byte integer of a number.
function fields.pack_varint(value)
  if value < 0x80 then return char(value) end
  return char(value & 0x7F | 0x80) .. fields.pack_varint(value >> 7)
end

--- A string with its length before it.
function fields.pack_binary(value)
  return pack(">s2", value)
end

return fields
