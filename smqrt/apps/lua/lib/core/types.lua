-- Classes of the API: their instances are tables with a metatable and an integer handle, and `type` returns "userdata" for them.

local core = ...

local rawtype, getmetatable, select, error = type, debug.getmetatable, select, error

local classes = setmetatable({}, {__mode = "k"})

core.rawtype, core.getmetatable = rawtype, getmetatable

--- Return a new class: a metatable for whose instances `type` returns "userdata".
-- name: the type in error messages and tostring. methods: the functions of its instances.
-- Callers may add metamethods to the returned table.
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
