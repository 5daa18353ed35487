-- ba.json: encoding (spec: bas-api §7); ba/jsondecode.lua is the other direction.
--
-- Encoding is in Lua: a call of Python per value would take longer than encoding the value.
local core = ...

local byte, concat, find, format, gsub = string.byte, table.concat, string.find, string.format, string.gsub
local error, huge, math_type, next, pcall, rawlen, setmetatable = error, math.huge, math.type, next, pcall, rawlen, setmetatable
local getmetatable, rawtype, select, tonumber, tostring = core.getmetatable, core.rawtype, select, tonumber, tostring

local MAX_DEPTH <const> = 1000    -- of nested tables
local MAX_NAMES <const> = 500     -- cached texts of member names
local TOO_DEEP <const> = {}

ba.json = {}

--- The value of JSON null in tables.
ba.json.null = setmetatable({}, core.class("null", {}))
getmetatable(ba.json.null).__tostring = function() return "null" end

local ESCAPES = {['"'] = '\\"', ["\\"] = "\\\\", ["\b"] = "\\b", ["\f"] = "\\f", ["\n"] = "\\n", ["\r"] = "\\r", ["\t"] = "\\t"}

setmetatable(ESCAPES, {__index = function(known, char)
  known[char] = format("\\u%04x", byte(char))
  return known[char]
end})

local function quoted(text)
  if find(text, '[%c"\\]') then text = gsub(text, '[%c"\\]', ESCAPES) end
  return '"' .. text .. '"'
end

local function number(value)
  if math_type(value) == "integer" then return value end
  if value ~= value or value == huge or value == -huge then return "null" end
  local text = tostring(value)
  if tonumber(text) == value then return text end
  text = format("%.17g", value)
  return find(text, "[.e]") and text or text .. ".0"
end

local names, names_left = {}, MAX_NAMES -- name -> '"name":'

local function name_text(key)
  local kind = rawtype(key)
  if kind ~= "string" then return kind == "number" and '"' .. tostring(key) .. '":' or nil end
  local text = quoted(key) .. ":"
  if names_left == 0 then names, names_left = {}, MAX_NAMES end
  names[key], names_left = text, names_left - 1
  return text
end

local write_table

--- Returns the JSON of a value that is neither string nor table.
local function scalar(value, kind)
  if kind == "number" then return number(value) end
  if kind == "boolean" then return value and "true" or "false" end
  return "null"
end

--- Appends the JSON of a value to out, which has n parts, and returns its new number of parts.
-- open: the tables that enclose the value, as keys, and `depth`, their number.
local function write(out, n, value, open)
  local kind = rawtype(value)
  if kind == "string" then out[n + 1] = quoted(value)
  elseif kind == "table" then return write_table(out, n, value, open)
  else out[n + 1] = scalar(value, kind) end
  return n + 1
end

local function write_array(out, n, array, length, open)
  local separator = "["
  for i = 1, length do
    out[n + 1] = separator
    n = write(out, n + 1, array[i], open)
    separator = ","
  end
  out[n + 1] = "]"
  return n + 1
end

local function write_object(out, n, object, open)
  local separator = "{"
  for key, value in next, object do
    local name = names[key] or name_text(key)
    if name then
      out[n + 1], out[n + 2] = separator, name
      n = write(out, n + 2, value, open)
      separator = ","
    end
  end
  out[n + 1] = separator == "{" and "{}" or "}"
  return n + 1
end

write_table = function(out, n, value, open)
  if open[value] or getmetatable(value) and core.type(value) == "userdata" then -- a cycle, or an object of the API
    out[n + 1] = "null"
    return n + 1
  end
  local depth = open.depth + 1
  if depth > MAX_DEPTH then error(TOO_DEEP, 0) end
  open[value], open.depth = true, depth
  local length = rawlen(value)
  if length > 0 then n = write_array(out, n, value, length, open) else n = write_object(out, n, value, open) end
  open[value], open.depth = nil, depth - 1
  return n
end

--- Returns the JSON text of a string, with its quotes.
function ba.json.encodestr(text)
  return quoted(core.arg.string(text, 1, "encodestr"))
end

local function encode(value)
  local out = {}
  return concat(out, "", 1, write(out, 0, value, {depth = 0}))
end

--- ba.json.encode(table [,table...]): returns the JSON texts of the tables, joined.
-- A table with a positive length is an array, holes are null; other tables are objects. Values that JSON can't represent are null.
-- Returns nil, "stackoverflow" for tables nested too deeply. Raises when an argument is not a table.
function ba.json.encode(...)
  local texts = {}
  for i = 1, select("#", ...) do
    local ok, text = pcall(encode, core.arg.table((select(i, ...)), i, "encode"))
    if text == TOO_DEEP then return nil, "stackoverflow" end
    if not ok then error(text, 0) end
    texts[i] = text
  end
  if #texts == 0 then core.bad_argument(1, "encode", "table", nil) end
  return concat(texts)
end

--- Returns the payload that publishes `value`: strings and bytearrays unchanged, other values as JSON, in which nil, NaN and
-- infinities are null. Raises "bad argument" for other values that JSON can't represent.
function core.payload(value, index, fname)
  local kind = rawtype(value)
  if kind == "string" then return value end
  if kind == "nil" then return "null" end
  if core.is_bytearray(value) then return tostring(value) end
  local plain = kind == "number" or kind == "boolean" or kind == "table"
  if not plain or core.type(value) == "userdata" and value ~= ba.json.null then
    core.bad_argument(index, fname, "string, table, number, boolean or nil", value)
  end
  local ok, text = pcall(encode, {value})
  if not ok then core.raise("bad argument #" .. index .. " to '" .. fname .. "' (nested too deeply)") end
  return text:sub(2, -2)
end
