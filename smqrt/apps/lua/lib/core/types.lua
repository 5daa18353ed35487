-- Objects of the API are tables with a metatable and an integer handle. Applications see them as userdata.

local core = ...

local rawtype, getmetatable, select, error = type, debug.getmetatable, select, error

local classes = setmetatable({}, {__mode = "k"})

core.rawtype, core.getmetatable = rawtype, getmetatable

--- Makes a class: a metatable whose instances answer "userdata" to `type`.
-- name: what error messages and tostring call it. methods: the functions of its instances.
-- Further metamethods are set on the table that is returned.
function core.class(name, methods)
  local class = {__index = methods, __name = name, __metatable = name}
  classes[class] = true
  return class
end

local function typeof(value)
  local kind = rawtype(value)
  if kind == "table" and classes[getmetatable(value)] then return "userdata" end
  return kind
end
core.type = typeof

function type(...)
  if select("#", ...) == 0 then error("bad argument #1 to 'type' (value expected)", 2) end
  return typeof((...))
end
