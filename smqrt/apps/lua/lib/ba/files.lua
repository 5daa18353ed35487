-- io objects and the files they open (spec: bas-api §6). An io is a handle on a folder or a ZIP file; names are relative to it.
local core, py = ...

local isyieldable, sub, unpack = core.isyieldable, string.sub, string.unpack
local getmetatable, ipairs, load, select, setmetatable, tostring, type =
  core.getmetatable, ipairs, load, select, setmetatable, tostring, type

local ENTRY <const> = ">s4Bi8I8" -- name, isdir, mtime, size
local WRITE_PIECE_BYTES <const> = 1 << 20 -- longer strings are passed to Python in pieces; other activities run in between

local io, file = {}, {}
local io_class, file_class = core.class("io", io), core.class("file", file)

-- One object per handle, so that the same io is the same object everywhere.
local objects = setmetatable({}, {__mode = "v"})

local function remember(object)
  objects[object.handle] = object
  return object
end

local function wrap(handle)
  if handle == nil then return nil end
  local object = objects[handle]
  return object or core.io.of_lua(handle) or remember(setmetatable({handle = handle}, io_class))
end

local classes = {[io_class] = true} -- of all io objects

local function check_io(value, at, name)
  if not classes[getmetatable(value)] then core.bad_argument(at, name, "io", value) end
  return value.handle
end

-- Performs an operation in a thread while the activity waits, or directly where it can't wait.
local function perform(operation, handle, name, more)
  if isyieldable() then return py.perform(operation, handle, name, more) end
  return py.perform_here(operation, handle, name, more)
end

-- Returns the text of a Lua file and its chunk name, or nil and an error word.
local function source(self, name)
  local file <close>, message = self:open(name)
  if not file then return nil, message end
  local text, fault = file:read"a"
  if fault then return nil, fault end
  return text or "", "@" .. py.label(self.handle, name)
end

local function collected(self)
  if not objects[self.handle] then py.drop_io(self.handle) end -- otherwise a newer object has the handle
end

io_class.__gc = collected
local function of_lua() return nil end -- until lib/ba/luaio.lua registers ios in Lua

core.io = {
  wrap = wrap, check = check_io, source = source, classes = classes, remember = remember, collected = collected, of_lua = of_lua,
}

-- syntax: ba.openio(name) -> io | nil       ba.io() -> table of all       ba.mkio(io, path) -> io | nil, error
function ba.openio(name) return wrap(py.named_io(core.arg.string(name, 1, "openio"))) end

function ba.io()
  local all, names = {}, {py.io_names()}
  for at = 1, #names do all[names[at]] = ba.openio(names[at]) end
  return all
end

function ba.mkio(base, path)
  local base_handle, handle, message = check_io(base, 1, "mkio")
  path = core.arg.string(path, 2, "mkio")
  if base.callbacks then return core.io.sub_of_lua(base, path) end
  handle, message = perform("sub", base_handle, path)
  if not handle then return nil, message end
  return wrap(handle)
end

for _, operation in ipairs{"mkdir", "rmdir", "remove"} do
  io[operation] = function(self, name) return perform(operation, self.handle, core.arg.string(name, 1, operation)) end
end

function io:rename(from, to)
  return perform("rename", self.handle, core.arg.string(from, 1, "rename"), core.arg.string(to, 2, "rename"))
end

function io:realpath(name) return py.realpath(self.handle, core.arg.string(name, 1, "realpath")) end

function io:resourcetype() return py.resourcetype(self.handle), "linux" end

-- syntax: io:stat(name) -> {name, mtime, size, isdir, type} | nil, error
function io:stat(name)
  local handle = self.handle
  name = core.arg.string(name, 1, "stat")
  local base, mtime, size, isdir = py.stat_now(handle, name)
  if base == false then base, mtime, size, isdir = perform("stat", handle, name) end
  if not base then return nil, mtime end
  return {name = base, mtime = mtime, size = size, isdir = isdir, type = isdir and "directory" or "regular"}
end

local listing_class = {__gc = function(listing) py.end_list(listing.number) end}

local function next_part(listing)
  local list, number
  if isyieldable() then
    list, number = py.list_more(listing.number)
  else
    list, number = py.list_more_here(listing.number)
  end
  if not list then core.raise(number) end
  listing.number = number
  return list
end

-- syntax: for name [, isdir, mtime, size] in io:files(path [, stat]) do ... end
function io:files(path, stat)
  local list, number = perform("files", self.handle, core.arg.string(path, 1, "files"))
  if not list then core.raise(number) end
  local listing, at = setmetatable({number = number}, listing_class), 1
  return function()
    while at > #list do
      if listing.number == 0 then return nil end
      list, at = next_part(listing), 1
    end
    local name, isdir, mtime, size
    name, isdir, mtime, size, at = unpack(ENTRY, list, at)
    if stat then return name, isdir == 1, mtime, size end
    return name
  end
end

-- syntax: io:open(name [, mode="r"]) -> file | nil, error
function io:open(name, mode)
  name, mode = core.arg.string(name, 1, "open"), mode == nil and "r" or core.arg.string(mode, 2, "open")
  local handle, message
  if mode == "r" or mode == "rb" then handle, message = py.open_now(self.handle, name) end
  if handle == nil and not message or handle == false then handle, message = perform("open", self.handle, name, mode) end
  if not handle then return nil, message end
  return setmetatable({handle = handle, owner = self}, file_class)
end

-- syntax: io:loadfile(name [, env]) -> function | nil, error       io:dofile(name [, env]) -> what the file returns
function io:loadfile(name, environment)
  local text, chunk_name = source(self, core.arg.string(name, 1, "loadfile"))
  if not text then return nil, chunk_name end
  text = core.without_mark(text)
  if environment == nil then return load(text, chunk_name, "t") end
  return load(text, chunk_name, "t", environment)
end

function io:dofile(name, environment)
  local chunk, message = self:loadfile(name, environment)
  if not chunk then core.raise(name .. ": " .. message) end
  return chunk()
end

function io:close() return true end

core.io.loadfile, core.io.dofile = io.loadfile, io.dofile

-- syntax: ba.loadfile(name [, io] [, env]) -> function | nil, error
function ba.loadfile(name, from, environment)
  name = core.arg.string(name, 1, "loadfile")
  if from ~= nil and not classes[getmetatable(from)] then from, environment = nil, from end
  return (from or ba.openio"home"):loadfile(name, environment)
end

local function file_handle(self, name)
  local handle = self.handle
  if not handle then core.raise("attempt to use a closed file in '" .. name .. "'") end
  return handle
end

local DEFAULT_READ_BYTES <const> = 4096

local function size_of(amount)
  if amount == nil then return DEFAULT_READ_BYTES end
  if amount == "a" or amount == "*a" then return -1 end
  return core.arg.size(amount, 1, "read")
end
core.io.size_of = size_of

-- syntax: file:read([bytes | "a"]) -> string | nil at the end | nil, error
function file:read(amount)
  local handle, size = file_handle(self, "read"), size_of(amount)
  local data, message = py.read_now(handle, size)
  if message then return nil, message end
  if data ~= false then return data end
  if isyieldable() then return py.read(handle, size) end
  return py.read_here(handle, size)
end

local function write(handle, text)
  local done, message = py.write_now(handle, text)
  if done ~= false then return done, message end
  if isyieldable() then return py.write(handle, text) end
  return py.write_here(handle, text)
end

local function write_long(handle, text)
  for at = 1, #text, WRITE_PIECE_BYTES do
    local ok, message = write(handle, sub(text, at, at + WRITE_PIECE_BYTES - 1))
    if not ok then return nil, message end
  end
  return true
end

-- syntax: file:write(value, ...) -> true | nil, error      strings and numbers
-- Written data is passed to the system after half a second, or at flush or close, which return whether that succeeded.
function file:write(...)
  local handle = file_handle(self, "write")
  for at = 1, select("#", ...) do
    local text = core.arg.string(select(at, ...), at, "write")
    local ok, message = (#text > WRITE_PIECE_BYTES and write_long or write)(handle, text)
    if not ok then return nil, message end
  end
  return true
end

-- Moves to a position counted from the start (default 0).
function file:seek(offset)
  local handle = file_handle(self, "seek")
  offset = offset == nil and 0 or core.arg.integer(offset, 1, "seek")
  local done, message = py.seek_now(handle, offset)
  if message then return nil, message end
  if done then return true end
  if isyieldable() then return py.seek(handle, offset) end
  return py.seek_here(handle, offset)
end

function file:flush()
  local handle = file_handle(self, "flush")
  if isyieldable() then return py.flush(handle) end
  return py.flush_here(handle)
end

function file:getio() return self.owner end

-- The file is closed in the background if waiting is impossible.
function file:close()
  local handle = self.handle
  if not handle then return false end
  self.handle = nil
  if isyieldable() then return py.close(handle) end
  return py.drop(handle)
end

file_class.__close = file.close
file_class.__gc = function(self)
  local handle = self.handle
  self.handle = nil
  if handle then py.drop(handle) end
end

-- loadfile and dofile of Lua, for any file on the disk, without blocking other activities.
local plain_loadfile, plain_dofile = loadfile, dofile
local SYSTEM_TEXTS <const> = {notfound = "No such file or directory", noaccess = "Permission denied"}

local function text_of(name)
  local disk = ba.openio"disk"
  local file <close>, message = disk:open(py.absolute(name))
  if not file then return nil, message end
  local text, fault = file:read"a"
  if fault then return nil, fault end
  return core.without_mark(text or "")
end

function _G.loadfile(name, mode, ...)
  if name == nil or not isyieldable() then return plain_loadfile(name, mode, ...) end
  local text, fault = text_of(core.arg.string(name, 1, "loadfile"))
  if not text then return nil, "cannot open " .. name .. ": " .. (SYSTEM_TEXTS[fault] or fault) end
  return load(text, "@" .. name, mode, ...)
end

function _G.dofile(name)
  if name == nil or not isyieldable() then return plain_dofile(name) end
  local chunk, message = _G.loadfile(name)
  if not chunk then core.raise(message) end
  return chunk()
end
