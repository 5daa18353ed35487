-- Io objects that applications implement (spec: bas-api §4, §6).
--
-- The callbacks are called without self and may block. Lua calls them directly, Python through `serve`.
local core, py = ...

local concat, find, gmatch, pack = table.concat, string.find, string.gmatch, string.pack
local error, ipairs, math, select, setmetatable, type, xpcall = error, ipairs, math, select, setmetatable, type, xpcall

local CALLBACKS <const> = {"open", "files", "stat", "mkdir", "rmdir", "remove", "rename"}
local ENTRY <const> = ">s4Bi8I8" -- name, isdir, mtime, size
local MAX_ENTRIES <const> = 100000
local PIECE_BYTES <const> = 8192
local MAX_READ_BYTES <const> = 64 << 20 -- as of other files

local ERROR_WORDS <const> = {}
for word in gmatch("invalidname notfound exist enoent noaccess notempty ioerror nospace mem locked noimplementation ziperror wrongpassword", "%a+") do
  ERROR_WORDS[word] = true
end

local io, file = {}, {}
local io_class, file_class = core.class("io", io), core.class("file", file)

-- Returns the result of a callback: its value, or nil and an error word. An error in the callback is logged.
local function result_of(done, value, fault)
  if done then
    if value ~= nil and value ~= false then return value end
    if value == nil and fault == nil then return nil end
    return nil, ERROR_WORDS[fault] and fault or "ioerror"
  end
  if value == nil then error(nil, 0) end -- the callback has ended its page: end the outer ones too
  core.log_error("ba.create.luaio: " .. value)
  return nil, "ioerror"
end

local function with_traceback(message)
  return message ~= nil and core.traceback(message) or nil
end

local function call(callback, ...)
  if callback == nil then return nil, "noimplementation" end
  return result_of(xpcall(callback, with_traceback, ...))
end

-- Calls a callback for which nil without an error word is a failure as well.
local function call_required(callback, ...)
  local value, fault = call(callback, ...)
  if value == nil then return nil, fault or "ioerror" end
  return value
end

-- Returns the path from the root of the callbacks, or nil and "invalidname".
local function full_path(self, name)
  if find(name, "[%z\\]") then return nil, "invalidname" end
  local parts = {}
  for part in gmatch(name, "[^/]+") do
    if part == ".." and #parts == 0 then return nil, "invalidname" end
    if part == ".." then
      parts[#parts] = nil
    elseif part ~= "." then
      parts[#parts + 1] = part
    end
  end
  if self.prefix ~= "" then parts[0] = self.prefix end
  return concat(parts, "/", self.prefix ~= "" and 0 or 1)
end

local function integer(value)
  return type(value) == "number" and value == value and math.tointeger(value // 1) or 0
end

local function stat_fields(stat)
  return stat.isdir and true or false, integer(stat.mtime), math.max(0, integer(stat.size))
end

local function invalid_result(what)
  core.log_error("ba.create.luaio: " .. what)
  return nil, "ioerror"
end

-- -> isdir, mtime, size | nil, error
local function stat_of(callbacks, path)
  local stat, fault = call(callbacks.stat, path)
  if stat == nil and path == "" then return true, 0, 0 end -- the root always exists
  if stat == nil then return nil, fault or "ioerror" end
  if type(stat) ~= "table" then return invalid_result("stat must return a table, not a " .. type(stat)) end
  return stat_fields(stat)
end

local function open(callbacks, path, mode)
  local object, fault = call_required(callbacks.open, path, mode)
  if not object then return nil, fault end
  if type(object) ~= "table" and type(object) ~= "userdata" then
    return invalid_result("open must return a table with functions, not a " .. type(object))
  end
  return object
end

-- -> a function that returns name, isdir, mtime, size of the next entry and nil at the end | nil, error
local function entries(callbacks, path)
  local list, fault = call_required(callbacks.files, path)
  if not list then return nil, fault end
  if type(list) ~= "table" and type(list) ~= "userdata" then
    return invalid_result("files must return a table with functions, not a " .. type(list))
  end
  return function(with_stat)
    if not call(list.read) then return nil end
    local name = call_required(list.name)
    if type(name) ~= "string" then return nil end
    local stat = with_stat and call(list.stat)
    if type(stat) ~= "table" then return name, false, 0, 0 end
    return name, stat_fields(stat)
  end
end

-- Performs an operation without a result on an open file: nil without an error word is success.
local function operate(object, operation, ...)
  local value, fault = call(object[operation], ...)
  if value == nil and fault then return nil, fault end
  return true
end

local function read(object, size)
  local data, fault = call(object.read, size)
  if data == nil then return nil, fault end
  if type(data) ~= "string" then return invalid_result("read must return a string, not a " .. type(data)) end
  if data == "" and size > 0 then return nil end
  return data
end

function io:stat(name)
  local path, fault = full_path(self, core.arg.string(name, 1, "stat"))
  if not path then return nil, fault end
  local isdir, mtime, size = stat_of(self.callbacks, path)
  if isdir == nil then return nil, mtime end
  local base = path:match"[^/]*$"
  return {name = base, mtime = mtime, size = size, isdir = isdir, type = isdir and "directory" or "regular"}
end

function io:files(path, stat)
  local folder, fault = full_path(self, core.arg.string(path, 1, "files"))
  local next_entry
  if folder then next_entry, fault = entries(self.callbacks, folder) end
  if not next_entry then core.raise(fault) end
  return function()
    local name, isdir, mtime, size = next_entry(stat)
    if not name then return nil end
    if stat then return name, isdir, mtime, size end
    return name
  end
end

for _, operation in ipairs{"mkdir", "rmdir", "remove"} do
  io[operation] = function(self, name)
    local path, fault = full_path(self, core.arg.string(name, 1, operation))
    if not path then return nil, fault end
    local done, failure = call_required(self.callbacks[operation], path)
    if not done then return nil, failure end
    return true
  end
end

function io:rename(from, to)
  local old, fault = full_path(self, core.arg.string(from, 1, "rename"))
  local new, failure = full_path(self, core.arg.string(to, 2, "rename"))
  if not (old and new) then return nil, fault or failure end
  old, fault = call_required(self.callbacks.rename, old, new)
  if not old then return nil, fault end
  return true
end

function io:open(name, mode)
  mode = mode == nil and "r" or core.arg.string(mode, 2, "open")
  local path, fault = full_path(self, core.arg.string(name, 1, "open"))
  if not path then return nil, fault end
  local object, failure = open(self.callbacks, path, mode)
  if not object then return nil, failure end
  return setmetatable({object = object, owner = self}, file_class)
end

function io:realpath(name)
  name = core.arg.string(name, 1, "realpath")
  return nil, "noimplementation"
end

function io:resourcetype() return "lua", "linux" end

function io:close() return true end

io.loadfile, io.dofile = core.io.loadfile, core.io.dofile

local function object_of(self, name)
  if not self.object then core.raise("attempt to use a closed file in '" .. name .. "'") end
  return self.object
end

local function read_all(object)
  local pieces, count = {}, 0
  while true do
    local piece, fault = read(object, PIECE_BYTES)
    if fault then return nil, fault end
    if not piece then break end
    pieces[#pieces + 1], count = piece, count + #piece
    if count > MAX_READ_BYTES then return nil, "mem" end
    if core.isyieldable() then core.pause() end
  end
  return count > 0 and concat(pieces) or nil
end

function file:read(amount)
  local object, size = object_of(self, "read"), core.io.size_of(amount)
  if size < 0 then return read_all(object) end
  if size > MAX_READ_BYTES then size = MAX_READ_BYTES end
  return read(object, size)
end

function file:write(...)
  local object = object_of(self, "write")
  for at = 1, select("#", ...) do
    local ok, fault = operate(object, "write", core.arg.string(select(at, ...), at, "write"))
    if not ok then return nil, fault end
  end
  return true
end

function file:seek(offset)
  local object = object_of(self, "seek")
  offset = offset == nil and 0 or core.arg.integer(offset, 1, "seek")
  if offset < 0 then core.raise("seek: the offset counts from the start, it can't be negative") end
  return operate(object, "seek", offset)
end

function file:flush() return operate(object_of(self, "flush"), "flush") end

function file:getio() return self.owner end

function file:close()
  local object = self.object
  if not object then return false end
  self.object = nil
  return operate(object, "close")
end

file_class.__close = file.close

local objects, last_number = {}, 0 -- number -> result of `open`, for Python and for finalizers

local function keep(object)
  last_number = last_number + 1
  objects[last_number] = object
  return last_number
end

-- A finalizer can't wait, but the callback may have to.
function file_class:__gc()
  local object = self.object
  self.object = nil
  if object then py.close_soon(keep(object)) end
end

-- ---- operations for Python, which passes full paths

local serve = {}

function serve.stat(callbacks, path)
  local isdir, mtime, size = stat_of(callbacks, path)
  if isdir == nil then return nil, mtime end
  return mtime, size, isdir
end

-- -> the entries as one string
function serve.files(callbacks, path)
  local next_entry, fault = entries(callbacks, path)
  if not next_entry then return nil, fault end
  local list = {}
  for name, isdir, mtime, size in next_entry, true do
    if name ~= "." and name ~= ".." then list[#list + 1] = pack(ENTRY, name, isdir and 1 or 0, mtime, size) end
    if #list > MAX_ENTRIES then return nil, "mem" end
  end
  return concat(list)
end

function serve.change(callbacks, operation, ...)
  local done, fault = call_required(callbacks[operation], ...)
  if not done then return nil, fault end
  return true
end

function serve.open(callbacks, path, mode)
  local object, fault = open(callbacks, path, mode)
  if not object then return nil, fault end
  return keep(object)
end

function serve.read(_, number, size) return read(objects[number], size) end

function serve.operate(_, number, operation, ...) return operate(objects[number], operation, ...) end

function serve.close(_, number)
  local object = objects[number]
  objects[number] = nil
  return operate(object, "close")
end

py.attach(core.ref(function(ref, operation, ...) return serve[operation](core.deref(ref), ...) end))

local function wrap(handle, callbacks, prefix)
  return core.io.remember(setmetatable({handle = handle, callbacks = callbacks, prefix = prefix}, io_class))
end

io_class.__gc = core.io.collected

-- Returns the object of an io that Python still has; nil when Lua does not implement it.
function core.io.of_lua(handle)
  local ref, prefix = py.facts(handle)
  return ref and wrap(handle, core.deref(ref), prefix)
end

-- Returns an io of the current content of a ZIP file, which is read into memory.
local function archive(self, name, path)
  local file <close>, fault = self:open(name)
  if not file then return nil, fault end
  local data, failure = file:read"a"
  if failure then return nil, failure end
  local handle, message = py.archive(self.handle, path, data or "")
  if not handle then return nil, message end
  return core.io.wrap(handle)
end

function core.io.sub_of_lua(self, path)
  local inner, fault = full_path(self, path)
  if not inner then return nil, fault end
  local isdir, failure = stat_of(self.callbacks, inner)
  if isdir == nil then return nil, failure end
  if not isdir then return archive(self, path, inner) end
  return wrap(py.sub(self.handle, inner), self.callbacks, inner)
end

core.io.classes[io_class] = true

-- syntax: ba.create.luaio{open, files, stat, mkdir, rmdir, remove, rename} -> io
function ba.create.luaio(callbacks)
  core.arg.table(callbacks, 1, "luaio")
  for _, name in ipairs(CALLBACKS) do
    core.arg.optional(core.arg["function"], callbacks[name], nil, 1, "luaio." .. name)
  end
  return wrap(py.new(core.ref(callbacks), core.in_shared_module()), callbacks, "")
end
