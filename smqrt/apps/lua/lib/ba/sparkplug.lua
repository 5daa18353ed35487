-- Sparkplug B: payloads as tables (spec: bas-api §12).
local core, py = ...

local ipairs, isyieldable = ipairs, core.isyieldable
local SHORT_BYTES <const> = py.short()

local sparkplug = {DataType = {}}

--- Returns the result of `require`. Loads protobuf, which takes some 40 ms, in a thread where the caller can wait.
function core.require_sparkplug()
  if isyieldable() then py.prepare() end
  return sparkplug
end

-- SparkplugB.DataType.Int32 is 3, and SparkplugB.DataType[3] is "Int32"
for index, name in ipairs{py.types()} do
  sparkplug.DataType[name], sparkplug.DataType[index - 1] = index - 1, name
end

local function long_or_short(name, text)
  return (#text > SHORT_BYTES and isyieldable() and py[name .. "_long"] or py[name])(text)
end

-- syntax: SparkplugB.encode(payload) -> string      raises when a field is wrong
function sparkplug.encode(payload)
  return long_or_short("encode", core.table_codec.dump(core.arg.table(payload, 1, "encode")))
end

-- syntax: SparkplugB.decode(string) -> payload | nil, message
function sparkplug.decode(data)
  local fields, message = long_or_short("decode", core.arg.string(data, 1, "decode"))
  if not fields then return nil, message end
  return core.table_codec.load(fields)
end
