-- require "org.conman.cbor": CBOR (RFC 8949), with the interface of the module of that name (spec: bas-api §12).
--
-- TYPE contains the major types (0x00, 0x20, ... 0xE0), TAG the tags, SIMPLE the simple values and floats; encoders by name, decoders
-- by number. A decoder returns the value, the position after it, and the name of its type.
local core = ...

local error, ipairs, math_type, next, pack, pairs, rawtype = error, ipairs, math.type, next, string.pack, pairs, core.rawtype
local byte, char, concat, find, getmetatable, match, sub = string.byte, string.char, table.concat, string.find, getmetatable, string.match, string.sub
local isyieldable, pcall, select, setmetatable, tointeger = core.isyieldable, pcall, select, setmetatable, math.tointeger
local tostring, unpack, utf8_len = tostring, string.unpack, utf8.len

local MAX_DEPTH <const> = 200
local MAX_ENCODED_DEPTH <const> = 100 -- each level is a pcall, and Lua permits about 200
local MAX_VALUES <const> = core.json_values -- of a document; the limit of JSON documents
local MAX_MEMBERS <const> = math.max(MAX_VALUES // 4, 1) -- of a map
local MAX_UNORDERED_KEYS <const> = 4096 -- numbers in a map: an attacker can choose numbers with the same hash
local VALUES_PER_SLICE <const> = 4096 -- that take a few ms, before other activities run

local cbor = {TYPE = {}, TAG = {}, SIMPLE = {}}
local TYPE, TAG, SIMPLE = cbor.TYPE, cbor.TAG, cbor.SIMPLE

local left_in_slice = VALUES_PER_SLICE
local depth = 0 -- of the tables that are being encoded; shared by all calls, because metamethods may call `encode`

-- Count a value, and let other activities run from time to time. They may encode too, so they start at depth 0.
local function count()
  left_in_slice = left_in_slice - 1
  if left_in_slice > 0 then return end
  left_in_slice = VALUES_PER_SLICE
  if not isyieldable() then return end
  local own_depth = depth
  depth = 0
  core.pause()
  depth = own_depth
end

local PIECE_BYTES <const> = 1 << 20 -- that are checked in a few ms

-- Whether a string is UTF-8.
local function is_text(value)
  local from = 1
  while #value - from >= PIECE_BYTES do
    local last = from + PIECE_BYTES - 1
    if not utf8_len(value, from, last) then return false end
    from = last + 1
    while (byte(value, from) or 0) & 0xC0 == 0x80 do from = from + 1 end -- the other bytes of the last character
    if isyieldable() then core.pause() end
  end
  return utf8_len(value, from) ~= nil
end

-- ---- encoding

-- The head of an item: its major type and its number.
local function head(major, number)
  if number < 0 or number > 0xFFFFFFFF then return pack(">BI8", major | 27, number) end
  if number < 24 then return char(major | number) end
  if number < 0x100 then return pack("BB", major | 24, number) end
  if number < 0x10000 then return pack(">BI2", major | 25, number) end
  return pack(">BI4", major | 26, number)
end

local function whole(value, name)
  return tointeger(value) or error(name .. ": an integer is expected, got " .. tostring(value), 0)
end

local function text(value, name)
  if rawtype(value) == "string" then return value end
  if core.is_bytearray(value) then return tostring(value) end
  error(name .. ": a string is expected, got a " .. core.type(value), 0)
end

function TYPE.UINT(value)
  value = whole(value, "UINT")
  if value < 0 then error("UINT: " .. value .. " is negative", 0) end
  return head(0x00, value)
end

function TYPE.NINT(value)
  value = whole(value, "NINT")
  if value >= 0 then error("NINT: " .. value .. " is not negative", 0) end
  return head(0x20, ~value)
end

function TYPE.BIN(value)
  value = text(value, "BIN")
  return head(0x40, #value) .. value
end

function TYPE.TEXT(value)
  value = text(value, "TEXT")
  if not is_text(value) then error("TEXT: not UTF-8", 0) end
  return head(0x60, #value) .. value
end

local TOO_DEEP <const> = "tables are nested deeper than " .. MAX_ENCODED_DEPTH .. ", or in a circle: pass a table for references"

local function deeper(encode, ...)
  if depth >= MAX_ENCODED_DEPTH then error(TOO_DEEP, 0) end
  depth = depth + 1
  local ok, result = pcall(encode, ...)
  depth = depth - 1
  if not ok then error(result, 0) end
  return result
end

-- With a table for references, the first occurrence of a table gets tag 28, and further ones are references (tag 29).
local function shared(value, sref, encode, stref)
  if not sref then return deeper(encode, value, sref, stref) end
  if sref[value] then return head(0xC0, 29) .. head(0x00, sref[value]) end
  sref[value], sref.n = sref.n or 0, (sref.n or 0) + 1
  return head(0xC0, 28) .. deeper(encode, value, sref, stref)
end

local function items(value, sref, stref)
  local parts = {head(0x80, #value)}
  for at = 1, #value do parts[at + 1] = cbor.encode(value[at], sref, stref) end
  return concat(parts)
end

local function members(value, sref, stref)
  local parts, size = {""}, 0
  for key, item in pairs(value) do
    size = size + 1
    parts[#parts + 1] = cbor.encode(key, sref, stref)
    parts[#parts + 1] = cbor.encode(item, sref, stref)
  end
  parts[1] = head(0xA0, size)
  return concat(parts)
end

function TYPE.ARRAY(value, sref, stref) return shared(value, sref, items, stref) end

function TYPE.MAP(value, sref, stref) return shared(value, sref, members, stref) end

-- The bits of a float in half precision; nil when that would lose precision.
local function half_bits(value)
  if value ~= value then return 0x7E00 end
  local bits = unpack(">I4", pack(">f", value))
  local sign, exponent, fraction = bits >> 16 & 0x8000, (bits >> 23 & 0xFF) - 127, bits & 0x7FFFFF
  if exponent == 128 then return sign | 0x7C00 end
  if exponent == -127 then return fraction == 0 and sign or nil end
  local lost = exponent >= -14 and 13 or -1 - exponent -- bits of the fraction that do not fit
  if exponent > 15 or lost > 23 or (fraction | 0x800000) & ((1 << lost) - 1) ~= 0 then return nil end
  if exponent >= -14 then return sign | (exponent + 15) << 10 | fraction >> 13 end
  return sign | (fraction | 0x800000) >> lost
end

local function fits_single(value) return value ~= value or unpack(">f", pack(">f", value)) == value end

SIMPLE["false"] = function() return "\xF4" end
SIMPLE["true"] = function() return "\xF5" end
SIMPLE["null"] = function() return "\xF6" end
SIMPLE["undefined"] = function() return "\xF7" end
SIMPLE["__break"] = function() return "\xFF" end

function SIMPLE.half(value)
  local bits = fits_single(value) and half_bits(value) or error("half: " .. value .. " would lose precision", 0)
  return pack(">BI2", 0xF9, bits)
end

function SIMPLE.single(value)
  if not fits_single(value) then error("single: " .. value .. " would lose precision", 0) end
  return pack(">Bf", 0xFA, value)
end

function SIMPLE.double(value) return pack(">Bd", 0xFB, value) end

local function float(value)
  if not fits_single(value) then return SIMPLE.double(value) end
  return half_bits(value) and SIMPLE.half(value) or SIMPLE.single(value)
end

local function is_sequence(value)
  local size = #value
  if size == 0 then return false end
  local fields = 0
  for _ in next, value do fields = fields + 1 end
  return fields == size
end

local MAP = {}
cbor.__ENCODE_MAP = MAP

MAP["nil"] = SIMPLE.null

function MAP.boolean(value) return value and "\xF5" or "\xF4" end

function MAP.number(value)
  if math_type(value) == "float" then return float(value) end
  return value >= 0 and head(0x00, value) or head(0x20, ~value)
end

function MAP.string(value) return head(is_text(value) and 0x60 or 0x40, #value) .. value end

function MAP.table(value, sref, stref)
  local meta = getmetatable(value)
  if rawtype(meta) == "table" then
    if meta.__tocbor then return meta.__tocbor(value, sref, stref) end
    if meta.__len then return TYPE.ARRAY(value, sref, stref) end
    if meta.__pairs then return TYPE.MAP(value, sref, stref) end
  end
  if core.is_bytearray(value) then return TYPE.BIN(value) end
  if core.type(value) == "userdata" then error("a userdata can't be encoded", 0) end
  return (is_sequence(value) and TYPE.ARRAY or TYPE.MAP)(value, sref, stref)
end

-- syntax: cbor.encode(value [, sref] [, stref]) -> CBOR
-- sref: an empty table, which enables references, for tables that occur more than once or in circles.
-- stref: ignored; strings are always written in full.
function cbor.encode(value, sref, stref)
  count()
  local encode = MAP[rawtype(value)] or error("a " .. core.type(value) .. " can't be encoded", 0)
  return encode(value, sref, stref)
end

-- syntax: cbor.pencode(value [, sref] [, stref]) -> CBOR | nil, message
function cbor.pencode(...)
  local ok, result = pcall(cbor.encode, ...)
  if ok then return result end
  return nil, tostring(result)
end

-- ---- tags

local TAGS <const> = {
  _datetime = 0, _epoch = 1, _pbignum = 2, _nbignum = 3, _decimalfraction = 4, _bigfloat = 5, _tobase64url = 21, _tobase64 = 22,
  _tobase16 = 23, _cbor = 24, _nthstring = 25, _perlobj = 26, _serialobj = 27, _shareable = 28, _sharedref = 29, _rational = 30,
  _url = 32, _base64url = 33, _base64 = 34, _regex = 35, _mime = 36, _uuid = 37, _language = 38, _id = 39, _stringref = 256,
  _bmime = 257, _decimalfractionexp = 264, _bigfloatexp = 265, _indirection = 22098, _magic_cbor = 55799,
}
local OF_TEXT <const> = {"_datetime", "_url", "_base64url", "_base64", "_regex", "_mime"}
local OF_BYTES <const> = {"_pbignum", "_nbignum", "_cbor", "_uuid", "_bmime"}

for name, number in pairs(TAGS) do
  TAG[name] = function(value, sref, stref) return head(0xC0, number) .. cbor.encode(value, sref, stref) end
end
for _, name in ipairs(OF_TEXT) do
  TAG[name] = function(value) return head(0xC0, TAGS[name]) .. TYPE.TEXT(value) end
end
for _, name in ipairs(OF_BYTES) do
  TAG[name] = function(value) return head(0xC0, TAGS[name]) .. TYPE.BIN(value) end
end
function TAG._epoch(value)
  if rawtype(value) ~= "number" then error("_epoch: a number is expected", 0) end
  return head(0xC0, 1) .. cbor.encode(value)
end
function TAG._magic_cbor(...)
  if select("#", ...) == 0 then return head(0xC0, 55799) end
  return head(0xC0, 55799) .. cbor.encode(...)
end

-- ---- decoding. `ref` is the state of one document: its remaining depth and values, and its shared tables.

local function fail(position, message) error(message .. " (at byte " .. position .. ")", 0) end

local function enter(ref, position)
  ref.depth = (ref.depth or MAX_DEPTH) - 1
  if ref.depth < 0 then fail(position, "nested deeper than " .. MAX_DEPTH) end
end

local function leave(ref) ref.depth = ref.depth + 1 end

local function count_value(ref, position)
  count()
  ref.values = (ref.values or MAX_VALUES) - 1
  if ref.values < 0 then fail(position, "more than " .. MAX_VALUES .. " values: split the document up, or raise json_values") end
end

local WIDTHS <const> = {[24] = ">B", [25] = ">I2", [26] = ">I4", [27] = ">I8"}

-- The head at a position: major type, info, number (nil for an indefinite length), and the position after it.
local function read_head(packet, position)
  local first = byte(packet, position) or fail(position, "more data is needed")
  local major, info = first & 0xE0, first & 0x1F
  if info < 24 then return major, info, info, position + 1 end
  if info == 31 and major ~= 0x00 and major ~= 0x20 and major ~= 0xC0 then return major, info, nil, position + 1 end
  local format = WIDTHS[info] or fail(position, "not CBOR: additional information " .. info)
  if position + (1 << info - 24) > #packet then fail(position, "more data is needed") end
  return major, info, unpack(format, packet, position + 1)
end

local function decode(packet, position, conv, ref, is_key)
  count_value(ref, position)
  local major, info, number, behind = read_head(packet, position)
  if major == 0xE0 then
    local value, after, kind = SIMPLE[info](behind, number)
    if conv and conv[kind] then value = conv[kind](value, is_key) end
    return value, after, kind
  end
  local value, after, kind = TYPE[major](packet, behind, info, number, conv, ref)
  if major ~= 0xC0 and conv and conv[kind] then value = conv[kind](value, is_key) end
  return value, after, kind
end

-- Numbers above the maximum of an integer become floats.
local function unsigned(number) return number >= 0 and number or (number >> 1 | number & 1) * 2.0 end

TYPE[0x00] = function(_, position, _, number) return unsigned(number), position, "UINT" end

TYPE[0x20] = function(_, position, _, number)
  return number >= 0 and ~number or -1.0 - unsigned(number), position, "NINT"
end

-- A string of indefinite length, which consists of chunks.
local function chunks(packet, position, major, ref)
  local parts = {}
  while byte(packet, position) ~= 0xFF do
    count_value(ref, position)
    local kind, _, size, behind = read_head(packet, position)
    if kind ~= major or not size then fail(position, "a chunk of another type") end
    if size < 0 or size > #packet - behind + 1 then fail(position, "more data is needed") end
    parts[#parts + 1] = sub(packet, behind, behind + size - 1)
    position = behind + size
  end
  return concat(parts), position + 1
end

local function string_at(packet, position, size, major, ref)
  if not size then return chunks(packet, position, major, ref) end
  if size < 0 or size > #packet - position + 1 then fail(position, "more data is needed") end
  return sub(packet, position, position + size - 1), position + size
end

TYPE[0x40] = function(packet, position, _, size, _, ref)
  local value, behind = string_at(packet, position, size, 0x40, ref)
  return value, behind, "BIN"
end

TYPE[0x60] = function(packet, position, _, size, _, ref)
  local value, behind = string_at(packet, position, size, 0x60, ref)
  if not is_text(value) then fail(position, "text that is not UTF-8") end
  return value, behind, "TEXT"
end

-- A new table; it is registered before it is complete, since its items may refer to it.
local function new_table(ref, position)
  enter(ref, position)
  local value, slot = {}, ref.slot
  if slot then ref.shared[slot], ref.slot = value, nil end
  return value
end

TYPE[0x80] = function(packet, position, _, size, conv, ref)
  if size and (size < 0 or size > #packet - position + 1) then fail(position, "more data is needed") end
  local value, at = new_table(ref, position), 0
  while size and at < size or not size and byte(packet, position) ~= 0xFF do
    at = at + 1
    value[at], position = decode(packet, position, conv, ref)
  end
  leave(ref)
  return value, size and position or position + 1, "ARRAY"
end

local function check_members(at, position)
  if at > MAX_MEMBERS then fail(position, "a map with more than " .. MAX_MEMBERS .. " members: split it up, or raise json_values") end
end

TYPE[0xA0] = function(packet, position, _, size, conv, ref)
  if size and (size < 0 or size > (#packet - position + 1) // 2) then fail(position, "more data is needed") end
  local value, at, unordered = new_table(ref, position), 0, 0
  while size and at < size or not size and byte(packet, position) ~= 0xFF do
    at = at + 1
    check_members(at, position)
    local key, behind = decode(packet, position, conv, ref, true)
    if key == nil or key ~= key then fail(position, "a key of a map is nil or NaN") end
    if rawtype(key) == "number" and key ~= at and key ~= at - 1 then
      unordered = unordered + 1
      if unordered > MAX_UNORDERED_KEYS then
        fail(position, "a map with more than " .. MAX_UNORDERED_KEYS .. " numbers as keys, in no order")
      end
    end
    value[key], position = decode(packet, behind, conv, ref)
  end
  leave(ref)
  return value, size and position or position + 1, "MAP"
end

TYPE[0xC0] = function(packet, position, _, number, conv, ref)
  local value, behind, kind = TAG[number](packet, position, conv, ref)
  if conv and conv[kind] then value = conv[kind](value) end
  return value, behind, kind
end

-- A decoder that returns the item of a tag unchanged.
local function tagged(name)
  return function(packet, position, conv, ref)
    enter(ref, position)
    local value, behind = decode(packet, position, conv, ref)
    leave(ref)
    return value, behind, name
  end
end

for name, number in pairs(TAGS) do TAG[number] = tagged(name) end

setmetatable(TAG, {__index = function(_, number)
  if rawtype(number) == "number" then return tagged("tag_" .. number) end
end})

TAG[28] = function(packet, position, conv, ref)
  ref.shared = ref.shared or {}
  ref.shared_count = (ref.shared_count or 0) + 1
  local slot = ref.shared_count
  ref.slot = slot
  local value, behind = tagged "_shareable"(packet, position, conv, ref)
  ref.slot, ref.shared[slot] = nil, value
  return value, behind, "_shareable"
end

TAG[29] = function(packet, position, conv, ref)
  local number, behind, kind = tagged "_sharedref"(packet, position, conv, ref)
  local value = ref.shared and rawtype(number) == "number" and ref.shared[number + 1]
  if value == nil or value == false and kind then fail(position, "a reference to an unknown table") end
  return value, behind, "_sharedref"
end

TAG[55799] = function(packet, position, conv, ref)
  enter(ref, position)
  local value, behind, kind = decode(packet, position, conv, ref)
  leave(ref)
  return value, behind, kind
end

local function half(bits)
  local sign, exponent, fraction = bits >> 15 == 0 and 1.0 or -1.0, bits >> 10 & 0x1F, bits & 0x3FF
  if exponent == 31 then return fraction == 0 and sign * math.huge or 0.0 / 0.0 end
  if exponent == 0 then return sign * fraction * 2.0 ^ -24 end
  return sign * (fraction | 0x400) * 2.0 ^ (exponent - 25)
end

SIMPLE[20] = function(position) return false, position, "false" end
SIMPLE[21] = function(position) return true, position, "true" end
SIMPLE[22] = function(position) return nil, position, "null" end
SIMPLE[23] = function(position) return nil, position, "undefined" end
SIMPLE[25] = function(position, bits) return half(bits), position, "half" end
SIMPLE[26] = function(position, bits) return (unpack(">f", pack(">I4", bits))), position, "single" end
SIMPLE[27] = function(position, bits) return (unpack(">d", pack(">i8", bits))), position, "double" end
SIMPLE[31] = function(position) fail(position - 1, "an unexpected break") end
setmetatable(SIMPLE, {__index = function(_, info)
  if rawtype(info) == "number" then return function(position, number) return number, position, "simple" end end
end})

-- syntax: cbor.decode(packet [, position] [, conv]) -> value, position after it, type
-- conv: type name -> function(value, is_key), which returns a replacement for the value.
function cbor.decode(packet, position, conv, ref, is_key)
  packet = core.is_bytearray(packet) and tostring(packet) or core.arg.string(packet, 1, "decode")
  position = core.arg.optional(core.arg.positive, position, 1, 2, "decode")
  conv = core.arg.optional(core.arg.table, conv, nil, 3, "decode")
  return decode(packet, position, conv, ref or {}, is_key)
end

-- syntax: cbor.pdecode(packet [, position] [, conv]) -> value, position, type | nil, position, nil, message
function cbor.pdecode(...)
  local ok, value, position, kind = pcall(cbor.decode, ...)
  if ok then return value, position, kind end
  local message = tostring(value)
  return nil, tointeger(match(message, "at byte (%d+)%)$")) or 0, nil, message
end

local NUMBERS <const> = {UINT = "integer", NINT = "integer", half = "float", single = "float", double = "float"}

function cbor.isnumber(kind) return NUMBERS[kind] ~= nil end

function cbor.isinteger(kind) return NUMBERS[kind] == "integer" end

function cbor.isfloat(kind) return NUMBERS[kind] == "float" end

return cbor
