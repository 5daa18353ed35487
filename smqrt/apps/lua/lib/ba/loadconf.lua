-- mako.conf: a Lua file whose globals are the configuration (spec: runtime §1.2).
local core, py = ...

local load, mathtype, next, pcall, rawget, rawtype, setmetatable, xpcall =
  load, math.type, next, pcall, rawget, core.rawtype, setmetatable, xpcall

local MAX_DEPTH <const> = 16 -- of nested tables that are copied for the server

local conf = {} -- the result of `require "loadconf"`: one table, also after load()
local is_read = false

-- Returns the variables that the file sets. -> table, empty without a file | nil, message
local function variables_of_file()
  local text, chunk_name = py.source()
  if not text then
    if chunk_name then return nil, chunk_name end
    return {}
  end
  local variables = {}
  local environment = setmetatable({}, {
    __newindex = variables,
    __index = function(_, name)
      local value = rawget(variables, name)
      if value == nil then return _G[name] end
      return value
    end,
  })
  local chunk, fault = load(core.without_mark(text), chunk_name, "t", environment)
  if not chunk then return nil, fault end
  local done, message = xpcall(chunk, core.describe)
  if not done then return nil, message end
  return variables
end

-- syntax: conf.load() -> conf | nil, message      reads the file again; after an error `conf` is unchanged
local function read_again()
  local variables, message = variables_of_file()
  if not variables then return nil, message end
  for name in next, conf do conf[name] = nil end
  for name, value in next, variables do conf[name] = value end
  conf.load = read_again
  is_read = true
  return conf
end

local loadconf = {}
core.loadconf = loadconf

--- Returns the table of the variables. Reads the file at the first call, and raises its error.
function loadconf.get()
  if not is_read then
    local done, message = read_again()
    if not done then core.raise(message) end
  end
  return conf
end

local COPIED_TYPES <const> = {string = true, number = true, boolean = true}

-- Returns a copy of the values that can be passed to the server: no functions, no objects, no table within itself.
-- enclosing: the tables that contain the value.
local function copy(value, enclosing, depth)
  if COPIED_TYPES[rawtype(value)] then return value end
  if core.type(value) ~= "table" or enclosing[value] or depth > MAX_DEPTH then return nil end
  enclosing[value] = true
  local result = {}
  for key, item in next, value do
    if rawtype(key) == "string" or mathtype(key) == "integer" then result[key] = copy(item, enclosing, depth + 1) end
  end
  enclosing[value] = nil
  return result
end

-- Returns the variables for the server, which reads them before it starts. -> encoded table | nil, message
py.attach(core.ref(function()
  local done, message = pcall(loadconf.get)
  if not done then return nil, message end
  return core.table_codec.dump(copy(conf, {}, 1))
end))
