-- Modules of the API that consist of Python functions and a Lua file.

local core = ...

local blocking, check, error, load, ref = core.blocking, core.check, error, load, core.ref

core.modules = {} -- module name -> what its Lua file returned, for require

local finished = false -- true while Python destroys its objects: finalizers that still run must not call them

core.entries.finish = ref(function() finished = true end)

local function direct(fn)
  return function(...)
    if finished then return nil end
    return check(fn(...))
  end
end

-- The Python functions of a module by name. `...` is name, function, name, function, ...; the first `count` functions do not block.
local function python_functions(count, ...)
  local list, py = {...}, {}
  for i = 1, #list, 2 do
    local wrap = i <= 2 * count and direct or blocking
    py[list[i]] = wrap(list[i + 1])
  end
  return py
end

local function compiled(source, chunkname)
  local chunk, message = load(source, chunkname, "t")
  if not chunk then error(message, 0) end
  return chunk
end

core.entries.install = ref(function(name, source, chunkname, count, ...)
  core.modules[name] = compiled(source, chunkname)(core, python_functions(count, ...))
end)

core.entries.compile = ref(function(source, chunkname)
  return ref(compiled(source, chunkname))
end)

core.entries.eval = ref(function(source, chunkname, ...)
  return compiled(source, chunkname)(...)
end)
