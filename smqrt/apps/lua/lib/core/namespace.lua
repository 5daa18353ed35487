-- Joins the Python half and the Lua half of a part of the API.

local core = ...

local blocking, check, error, load, ref = core.blocking, core.check, error, load, core.ref

core.modules = {} -- what the Lua halves returned, by name, for require

local finished = false -- Python's objects are being taken apart: finalizers that still run must not reach them

core.entries.finish = ref(function() finished = true end)

local function direct(fn)
  return function(...)
    if finished then return nil end
    return check(fn(...))
  end
end

--- The table of the Python half: names and functions alternate, the first `count` are called directly, the others block.
local function python_half(count, ...)
  local halves, py = {...}, {}
  for i = 1, #halves, 2 do
    local join = i <= 2 * count and direct or blocking
    py[halves[i]] = join(halves[i + 1])
  end
  return py
end

local function compiled(source, chunkname)
  local chunk, message = load(source, chunkname, "t")
  if not chunk then error(message, 0) end
  return chunk
end

core.entries.install = ref(function(name, source, chunkname, count, ...)
  core.modules[name] = compiled(source, chunkname)(core, python_half(count, ...))
end)

core.entries.compile = ref(function(source, chunkname)
  return ref(compiled(source, chunkname))
end)

core.entries.eval = ref(function(source, chunkname, ...)
  return compiled(source, chunkname)(...)
end)
