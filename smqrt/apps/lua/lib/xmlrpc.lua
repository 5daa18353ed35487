-- require "xmlrpc": XML-RPC services over HTTP POST (xmlrpc.com/spec.md; spec: bas-api §12).
local core = ...

local arg, concat, describe, find, format, gsub, ipairs, isyieldable, match, mathtype, pairs, rawget, rawtype, setmetatable =
  core.arg, table.concat, core.describe, string.find, string.format, string.gsub, ipairs, core.isyieldable, string.match,
  math.type, pairs, rawget, core.rawtype, setmetatable
local b64decode, b64encode, tointeger, tonumber, unpack, xpcall =
  ba.b64decode, ba.b64encode, math.tointeger, tonumber, table.unpack, xpcall
local xml2table = require "xml2table"

local MAX_BODY_BYTES <const> = 1 << 20
local MAX_PARAMS <const> = 200
local MAX_DEPTH <const> = 100
local VALUES_PER_SLICE <const> = 500 -- that are converted before other activities run
-- Codes of "Specification for Fault Code Interoperability".
local PARSE <const>, UNKNOWN <const>, PARAMS <const>, FAILED <const> = -32700, -32601, -32602, -32500

local methods = {}
local class = {__index = methods, __name = "xmlrpc", __metatable = "xmlrpc"}

-- A function that is called for each value, and lets other activities run.
local function counter()
  local count = 0
  return function()
    count = count + 1
    if count % VALUES_PER_SLICE == 0 and isyieldable() then core.pause() end
  end
end

-- ---- from XML

local function child(element, tag)
  for _, one in ipairs(element or {}) do
    if core.type(one) == "table" and (not tag or one.tag == tag) then return one end
  end
end

local function text_of(element)
  local parts = {}
  for _, one in ipairs(element) do
    if core.type(one) ~= "table" then parts[#parts + 1] = one end
  end
  return concat(parts)
end

local function number_of(element)
  local number = tonumber(text_of(element))
  return number or error("'" .. text_of(element) .. "' is not a number", 0)
end

local function integer_of(element)
  return tointeger(number_of(element)) or error("'" .. text_of(element) .. "' is not an integer", 0)
end

-- Seconds since 1970; earlier times remain text. In the calculation of days, years begin in March.
local function time_of(element)
  local text = text_of(element)
  local year, month, day, hour, minute, second = match(text, "^%s*(%d%d%d%d)%-?(%d%d)%-?(%d%d)T(%d%d):?(%d%d):?(%d%d)")
  if not year then error("'" .. text .. "' is not a dateTime.iso8601", 0) end
  local y, m = tonumber(year), tonumber(month)
  if m <= 2 then y, m = y - 1, m + 12 end
  local days = 365 * y + y // 4 - y // 100 + y // 400 + (153 * (m - 3) + 2) // 5 + tonumber(day) - 719469
  local seconds = ((days * 24 + tonumber(hour)) * 60 + tonumber(minute)) * 60 + tonumber(second)
  return seconds >= 0 and seconds or text
end

local value_of

local readers = {
  int = integer_of, i4 = integer_of, i8 = integer_of, double = number_of, string = text_of, ["dateTime.iso8601"] = time_of,
  boolean = function(element) return integer_of(element) ~= 0 end,
  base64 = function(element) return b64decode((gsub(text_of(element), "%s", ""))) or error("not Base64", 0) end,
  ["nil"] = function() return nil end,
}

function readers.array(element, count)
  local values, at = {}, 0
  for _, one in ipairs(child(element, "data") or {}) do
    if core.type(one) == "table" then
      at = at + 1
      values[at] = value_of(one, count)
    end
  end
  return values
end

function readers.struct(element, count)
  local values = {}
  for _, member in ipairs(element) do
    if core.type(member) == "table" then
      local name, value = child(member, "name"), child(member, "value")
      if not name or not value then error("a member without a name or value", 0) end
      values[text_of(name)] = value_of(value, count)
    end
  end
  return values
end

function value_of(element, count)
  count()
  if element.tag ~= "value" then error("<value> expected, got <" .. tostring(element.tag) .. ">", 0) end
  local typed = child(element)
  if not typed then return text_of(element) end
  local read = readers[typed.tag] or error("unknown type <" .. tostring(typed.tag) .. ">", 0)
  return read(typed, count)
end

-- The name and the parameters of a call; raises an error for an invalid document.
local function call_of(document)
  local name = document.tag == "methodCall" and child(document, "methodName") or error("no <methodCall> with a <methodName>", 0)
  local params, count = {n = 0}, counter()
  for _, param in ipairs(child(document, "params") or {}) do
    if core.type(param) == "table" then
      params.n = params.n + 1
      if params.n > MAX_PARAMS then error("more than " .. MAX_PARAMS .. " parameters", 0) end
      params[params.n] = value_of(child(param, "value") or error("a parameter without a value", 0), count)
    end
  end
  return match(text_of(name), "^%s*(.-)%s*$"), params
end

-- ---- to XML

local ESCAPES <const> = {["&"] = "&amp;", ["<"] = "&lt;", [">"] = "&gt;", ["\r"] = "&#13;"}

local function string_xml(value)
  if find(value, "[\0-\8\11\12\14-\31]") or not utf8.len(value) or find(value, "\xEF\xBF[\xBE\xBF]") then
    return "<base64>" .. b64encode(value) .. "</base64>" -- characters that XML does not permit
  end
  return "<string>" .. gsub(value, "[&<>\r]", ESCAPES) .. "</string>"
end

local function number_xml(value)
  if mathtype(value) == "integer" and value >= -0x80000000 and value <= 0x7FFFFFFF then return "<int>" .. value .. "</int>" end
  if value ~= value or value == 1 / 0 or value == -1 / 0 then error("a number that XML-RPC can't hold", 0) end
  return "<double>" .. format("%.17g", value) .. "</double>"
end

local value_xml

local function table_xml(value, depth, count)
  if depth > MAX_DEPTH then error("tables are nested deeper than " .. MAX_DEPTH, 0) end
  local parts = {}
  if value[1] ~= nil or next(value) == nil then
    for at, one in ipairs(value) do parts[at] = value_xml(one, depth, count) end
    return "<array><data>" .. concat(parts) .. "</data></array>"
  end
  for name, one in pairs(value) do
    local text = gsub(tostring(name), "[&<>]", ESCAPES)
    parts[#parts + 1] = "<member><name>" .. text .. "</name>" .. value_xml(one, depth, count) .. "</member>"
  end
  return "<struct>" .. concat(parts) .. "</struct>"
end

function value_xml(value, depth, count)
  count()
  local kind, text = rawtype(value), nil
  if kind == "nil" then text = "<nil/>"
  elseif kind == "boolean" then text = value and "<boolean>1</boolean>" or "<boolean>0</boolean>"
  elseif kind == "number" then text = number_xml(value)
  elseif kind == "string" then text = string_xml(value)
  elseif core.type(value) == "table" then text = table_xml(value, depth + 1, count)
  else error("a " .. core.type(value) .. " can't be sent", 0) end
  return "<value>" .. text .. "</value>"
end

local HEAD <const> = '<?xml version="1.0" encoding="UTF-8"?>\n<methodResponse>'

local function fault(code, message)
  local values = {faultCode = code, faultString = message}
  return HEAD .. "<fault>" .. value_xml(values, 0, counter()) .. "</fault></methodResponse>"
end

-- ---- the service

local function function_of(self, name)
  local found = self.description
  for part in name:gmatch "[^.]+" do
    found = core.type(found) == "table" and rawget(found, part) or nil
  end
  return rawtype(found) == "function" and found or nil
end

-- An error message for the client: without the position, which only the log contains.
local function without_position(message)
  return (gsub(message, "^[^\n]-:%d+: ", ""))
end

local function answer(self, body)
  local document, word = xml2table(body, "keepspace")
  if not document then return fault(PARSE, word) end
  local ok, name, params = pcall(call_of, document)
  if not ok then return fault(PARAMS, name) end
  local f = function_of(self, name)
  if not f then return fault(UNKNOWN, "there is no method '" .. name .. "'") end
  local trace
  local function handler(value)
    trace = core.traceback(value)
    return describe(value)
  end
  local done, value = xpcall(f, handler, unpack(params, 1, params.n))
  if not done then
    core.log_error("XML-RPC method " .. name .. " failed: " .. trace)
    return fault(FAILED, without_position(value))
  end
  local fits, text = pcall(value_xml, value, 0, counter())
  if not fits then
    core.log_error("XML-RPC method " .. name .. " returned " .. describe(text))
    return fault(FAILED, "the result can't be sent: " .. describe(text))
  end
  return HEAD .. "<params><param>" .. text .. "</param></params></methodResponse>"
end

local function body_of(request)
  local parts, size = {}, 0
  for chunk in request:rawrdr(16384) do
    size = size + #chunk
    if size > MAX_BODY_BYTES then return nil end
    parts[#parts + 1] = chunk
  end
  return concat(parts)
end

-- syntax: service:execute(request, response)        handles the request
function methods:execute(request, response)
  arg.instance(self, class, 0, "execute")
  if not request:allow({"POST"}, false) then return end
  local body = body_of(request)
  if not body then return response:senderror(413) end
  response:setheader("Content-Type", "text/xml; charset=utf-8")
  response:write(answer(self, body))
end

-- syntax: xmlrpc.new(name, description) -> service        description: functions, which may be in tables: {math = {add = f}} is "math.add"
local function new(name, description)
  return setmetatable({name = arg.string(name, 1, "new"), description = arg.table(description, 2, "new")}, class)
end

return {new = new}
