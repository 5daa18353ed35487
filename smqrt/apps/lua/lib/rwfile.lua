-- require "rwfile": whole files in one call (spec: bas-api §6).
local core = ...

local arg = core.arg
local rwfile = {}

local function written(file, data)
  local ok, message = file:write(data)
  local closed, fault = file:close() -- writes buffered data, and so may fail
  if ok and closed then return true end
  return nil, message or fault
end

-- syntax: rwfile.file(io, name) -> string | nil, error      rwfile.file(io, name, data) -> true | nil, error
function rwfile.file(io, name, data)
  core.io.check(io, 1, "file")
  data = arg.optional(arg.string, data, nil, 3, "file")
  local file <close>, message = io:open(arg.string(name, 2, "file"), data and "w" or "r")
  if not file then return nil, message end
  if data then return written(file, data) end
  local text, fault = file:read"a"
  if fault then return nil, fault end
  return text or ""
end

-- syntax: rwfile.json(io, name) -> table | nil, error       rwfile.json(io, name, table) -> true | nil, error
function rwfile.json(io, name, value)
  if value ~= nil then
    local text, message = ba.json.encode(value)
    if not text then return nil, message end
    return rwfile.file(io, name, text)
  end
  local text, message = rwfile.file(io, name)
  if not text then return nil, message end
  local decoded = ba.json.decode((text:gsub("^\xEF\xBB\xBF", "")))
  if decoded == nil then return nil, "jsonerr" end
  return decoded
end

return rwfile
