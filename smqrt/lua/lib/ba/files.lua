-- io objects and the files they open (spec: bas-api 6). An io is a handle on a folder or a ZIP file; names are relative to it.
local core, py = ...

local isyieldable, unpack = core.isyieldable, string.unpack
local getmetatable, ipairs, load, select, setmetatable, tostring, type =
  core.getmetatable, ipairs, load, select, setmetatable, tostring, type

local ENTRY <const> = ">s4Bi8I8" -- name, isdir, mtime, size
local ENTRIES_A_TURN <const> = 256

local io, file = {}, {}
local io_class, file_class = core.class("io", io), core.class("file", file)

-- One object per handle, so that the same io is the same object everywhere.
local known = setmetatable({}, {__mode = "v"})

local function wrap(handle)
  if handle == nil then return nil end
  local object = known[handle]
  if not object then
    object = setmetatable({handle = handle}, io_class)
    known[handle] = object
  end
  return object
end

local function check_io(value, at, name)
  return core.arg.instance(value, io_class, at, name).handle
end

-- The text of a Lua file and its chunk name, or nil and an error word.
local function source(self, name)
  local text, message = py.read_all(self.handle, name)
  if not text then return nil, message end
  return text, "@" .. py.label(self.handle, name)
end

core.io = {wrap = wrap, check = check_io, source = source}

function io_class:__gc()
  if not known[self.handle] then py.drop_io(self.handle) end -- else a younger object has the handle
end

-- syntax: ba.openio(name) -> io | nil       ba.io() -> table of all       ba.mkio(io, path) -> io | nil, error
function ba.openio(name) return wrap(py.named_io(core.arg.string(name, 1, "openio"))) end

function ba.io()
  local all, names = {}, {py.io_names()}
  for at = 1, #names do all[names[at]] = ba.openio(names[at]) end
  return all
end

function ba.mkio(base, path)
  local handle, message = py.sub_io(check_io(base, 1, "mkio"), core.arg.string(path, 2, "mkio"))
  if not handle then return nil, message end
  return wrap(handle)
end

local function on_name(operation)
  return function(self, name) return py[operation](self.handle, core.arg.string(name, 1, operation)) end
end

for _, operation in ipairs{"mkdir", "rmdir", "remove", "realpath"} do io[operation] = on_name(operation) end

function io:rename(from, to)
  return py.rename(self.handle, core.arg.string(from, 1, "rename"), core.arg.string(to, 2, "rename"))
end

function io:resourcetype() return py.resourcetype(self.handle), "linux" end

-- syntax: io:stat(name) -> {name, mtime, size, isdir, type} | nil, error
function io:stat(name)
  local look = isyieldable() and py.stat_in_thread or py.stat
  local base, mtime, size, isdir = look(self.handle, core.arg.string(name, 1, "stat"))
  if not base then return nil, mtime end
  return {name = base, mtime = mtime, size = size, isdir = isdir, type = isdir and "directory" or "regular"}
end

-- syntax: for name [, isdir, mtime, size] in io:files(path [, stat]) do ... end
function io:files(path, stat)
  local look = isyieldable() and py.files_in_thread or py.files
  local list, message = look(self.handle, core.arg.string(path, 1, "files"))
  if not list then core.raise(message) end
  local at, count = 1, 0
  return function()
    if at > #list then return nil end
    count = count + 1
    if count % ENTRIES_A_TURN == 0 and isyieldable() then core.pause() end
    local name, isdir, mtime, size
    name, isdir, mtime, size, at = unpack(ENTRY, list, at)
    if stat then return name, isdir == 1, mtime, size end
    return name
  end
end

-- syntax: io:open(name [, mode="r"]) -> file | nil, error
function io:open(name, mode)
  mode = mode or "r"
  local handle, message = py.open(self.handle, core.arg.string(name, 1, "open"), core.arg.string(mode, 2, "open"))
  if not handle then return nil, message end
  return setmetatable({handle = handle, owner = self}, file_class)
end

-- syntax: io:loadfile(name [, env]) -> function | nil, error       io:dofile(name [, env]) -> what the file returns
function io:loadfile(name, environment)
  local text, chunk_name = source(self, core.arg.string(name, 1, "loadfile"))
  if not text then return nil, chunk_name end
  if environment == nil then return load(text, chunk_name, "t") end
  return load(text, chunk_name, "t", environment)
end

function io:dofile(name, environment)
  local chunk, message = self:loadfile(name, environment)
  if not chunk then core.raise(name .. ": " .. message) end
  return chunk()
end

function io:close() return true end

-- syntax: ba.loadfile(name [, io] [, env]) -> function | nil, error
function ba.loadfile(name, from, environment)
  if from ~= nil and getmetatable(from) ~= io_class then from, environment = nil, from end
  return (from or ba.openio"home"):loadfile(name, environment)
end

local function file_handle(self, name)
  local handle = self.handle
  if not handle then core.raise("attempt to use a closed file in '" .. name .. "'") end
  return handle
end

-- syntax: file:read([bytes | "a"]) -> string | nil at the end
function file:read(amount)
  local handle = file_handle(self, "read")
  if amount == "a" or amount == "*a" then return py.read(handle, -1) end
  return py.read(handle, amount == nil and 4096 or core.arg.integer(amount, 1, "read"))
end

function file:write(...)
  local handle = file_handle(self, "write")
  for at = 1, select("#", ...) do
    local value = select(at, ...)
    if type(value) == "number" then value = tostring(value) end
    local ok, message = py.write(handle, core.arg.string(value, at, "write"))
    if not ok then return nil, message end
  end
  return true
end

-- Moves to a position counted from the start (default 0).
function file:seek(offset)
  return py.seek(file_handle(self, "seek"), offset == nil and 0 or core.arg.integer(offset, 1, "seek"))
end

function file:flush() return py.flush(file_handle(self, "flush")) end

function file:getio() return self.owner end

function file:close()
  local handle = self.handle
  if not handle then return false end
  self.handle = nil
  return py.close(handle)
end

file_class.__close = file.close
file_class.__gc = file.close
