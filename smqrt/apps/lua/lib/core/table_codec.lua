-- Tables as strings, which cross between Lua and Python in one call; smqrt/apps/lua/bridge.py describes the format.

local core = ...

local concat, error, mathtype, next, pack, rawtype, tostring, unpack =
  table.concat, error, math.type, next, string.pack, core.rawtype, tostring, string.unpack

local MAX_DEPTH <const> = 20

local table_codec = {}
core.table_codec = table_codec

local put

local function put_fields(parts, value, depth)
  if depth > MAX_DEPTH then core.raise("a table is nested too deep") end
  local at, count = #parts + 1, 0
  parts[at] = ""
  for key, item in next, value do
    count = count + 1
    put(parts, key, depth + 1)
    put(parts, item, depth + 1)
  end
  parts[at] = pack(">c1I4", "m", count)
end

function put(parts, value, depth)
  local kind = rawtype(value)
  if kind == "number" then
    parts[#parts + 1] = mathtype(value) == "integer" and pack(">c1i8", "i", value) or pack(">c1d", "n", value)
  elseif kind == "boolean" then
    parts[#parts + 1] = value and "t" or "f"
  elseif kind == "table" and core.type(value) == "table" then
    put_fields(parts, value, depth)
  elseif kind == "string" or core.is_bytearray(value) then
    parts[#parts + 1] = pack(">c1s4", "s", tostring(value))
  else
    core.raise("a " .. core.type(value) .. " can't be sent")
  end
end

--- `value` as a string. Raises an error for functions, userdata other than byte arrays, and tables nested deeper than 20 levels.
function table_codec.dump(value)
  local parts = {}
  put(parts, value, 1)
  return concat(parts)
end

local get

local function get_fields(text, at)
  local fields, count, key, value = {}, nil, nil, nil
  count, at = unpack(">I4", text, at)
  for _ = 1, count do
    key, at = get(text, at)
    value, at = get(text, at)
    fields[key] = value
  end
  return fields, at
end

local FORMATS <const> = {s = ">s4", i = ">i8", n = ">d"}

function get(text, at)
  local kind = text:sub(at, at)
  if kind == "m" then return get_fields(text, at + 1) end
  if kind == "t" or kind == "f" then return kind == "t", at + 1 end
  local format = FORMATS[kind] or error("not an encoded table")
  return unpack(format, text, at + 1)
end

--- The value of a string of `dump`; an empty table for nil.
function table_codec.load(text)
  if not text then return {} end
  return (get(text, 1))
end
