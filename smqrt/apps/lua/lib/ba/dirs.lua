-- Virtual directories and resource readers (spec: bas-api §4).
--
-- The directory tree is in Python. This file has the Lua objects and their methods.
local core, py = ...

local error, getmetatable, ipairs, math, pairs, rawget, setmetatable, table, tostring, type =
  error, core.getmetatable, ipairs, math, pairs, rawget, setmetatable, table, tostring, type
local tonumber = tonumber

local exchange, arg = core.exchange, core.arg
local dir, reader = {}, {}
local dir_class = core.class("dir", dir)
local reader_class = core.class("resrdr", setmetatable(reader, {__index = dir}))

local handles = setmetatable({}, {__mode = "v"}) -- handle -> object

local function collected(self) py.collect(self.handle) end

dir_class.__gc, reader_class.__gc = collected, collected

local classes = {[dir_class] = true, [reader_class] = true}

local function is_dir(value) return classes[getmetatable(value)] == true end

-- Makes a class that inherits the methods of directories.
local function derive(name, methods)
  local class = core.class(name, setmetatable(methods, {__index = dir}))
  class.__gc, classes[class] = collected, true
  return class
end

-- Returns the directory of an argument, which may also be a table with a directory in `dir`, such as a web file manager.
local function check_dir(value, at, name)
  if is_dir(value) then return value end
  if type(value) == "table" and is_dir(rawget(value, "dir")) then return value.dir end
  core.bad_argument(at, name, "directory", value)
end

local function wrap(handle, class)
  local self = setmetatable({handle = handle, children = {}}, class)
  handles[handle] = self
  return self
end

-- Returns name, priority and the remaining arguments. Name and priority are optional. A single number is the priority; of two
-- numbers the first is the name.
local function name_and_priority(maker, name, priority, ...)
  local second = type(priority) == "number" and priority or type(priority) == "string" and tonumber(priority)
  if type(name) == "number" and not second then return "", name, priority, ... end
  if type(name) == "number" then return tostring(name), second, ... end
  if name ~= nil and type(name) ~= "string" then
    if second then core.bad_argument(1, maker, "string", name) end
    return "", 0, name, priority, ...
  end
  if second then return name or "", second, ... end
  if priority == nil then return name or "", 0, ... end
  return name or "", 0, priority, ...
end

local function check_priority(priority, maker)
  priority = math.tointeger(priority)
  if not priority or priority < -127 or priority > 127 then
    core.raise("bad argument to '" .. maker .. "' (priority must be an integer from -127 to 127)")
  end
  return priority
end

ba.create = ba.create or {}

-- syntax: ba.create.dir([name] [, priority]) -> dir
function ba.create.dir(...)
  local name, priority = name_and_priority("dir", ...)
  return wrap(py.new_dir(name, check_priority(priority, "dir")), dir_class)
end

-- syntax: ba.create.resrdr([name] [, priority], io) -> reader
function ba.create.resrdr(...)
  local name, priority, source = name_and_priority("resrdr", ...)
  return wrap(py.new_reader(name, check_priority(priority, "resrdr"), core.io.check(source, 3, "resrdr")), reader_class)
end

-- syntax: dir:insert([path])      as a root directory
--         dir:insert(child [, ref])      a parent keeps its children alive, with and without ref
-- A root directory exists as long as its object is referenced. Those that .preload inserts exist until the application is unloaded.
function dir:insert(child)
  if child == nil or type(child) == "string" or type(child) == "number" then
    py.insert_root(self.handle, arg.optional(arg.string, child, nil, 1, "insert"))
    local anchors = core.anchors
    if anchors then anchors[self] = true end
    return true
  end
  child = check_dir(child, 1, "insert")
  py.insert(self.handle, child.handle)
  self.children[child] = true
  return true
end

-- Inserts a directory that is searched before the reader's own files.
function reader:insertprolog(child)
  child = check_dir(child, 1, "insertprolog")
  py.insert_prolog(self.handle, child.handle)
  self.children[child] = true
  return true
end

function dir:unlink()
  local was_linked, parent = py.unlink(self.handle)
  local owner = parent and handles[parent]
  if owner then owner.children[self] = nil end
  return was_linked
end

-- syntax: dir:setfunc(f | nil)      f(_ENV, relpath), where _ENV has request, response and app; returning exactly false continues the search
function dir:setfunc(f)
  core.arg.optional(core.arg["function"], f, nil, 1, "setfunc")
  self.func, self.app = f, f and core.app_of(f)
  py.set_function(self.handle, f ~= nil)
  return true
end

-- Returns names as one string with commas. Accepts such a string or an array.
local function names(value, index, fname)
  return arg.string(type(value) == "table" and table.concat(value, ",") or value, index, fname)
end

local cors_fields = {
  origins = names, methods = names, headers = names, expose = names, credentials = arg.boolean, maxage = arg.integer,
}

-- syntax: dir:setcors{[origins=, methods=, headers=, expose=, credentials=, maxage=]}      without rules: the setting `origins` applies
function dir:setcors(rules)
  rules = arg.optional(arg.table, rules, {}, 1, "setcors")
  for name in pairs(rules) do
    if not cors_fields[name] then core.raise("setcors: unknown field '" .. tostring(name) .. "'") end
  end
  local checked = {}
  for name, check in pairs(cors_fields) do checked[name] = arg.optional(check, rules[name], nil, "1." .. name, "setcors") end
  py.set_cors(
    self.handle, checked.origins, checked.methods, checked.headers, checked.expose, checked.credentials, checked.maxage
  )
  return true
end

function dir:baseuri() return py.baseuri(self.handle) end

function dir:name() return py.name(self.handle) end

-- syntax: dir:service(request, relpath [, as_forward]) -> whether it was handled
function dir:service(request, relpath, as_forward)
  core.arg.instance(request, exchange.class, 1, "service")
  relpath = core.arg.string(relpath, 2, "service")
  local handle = exchange.handle_of(request)
  local handled = py.service(self.handle, handle, relpath, as_forward == true, request.take())
  if request.stopped then error(nil, 0) end
  return handled
end

-- Replaces the headers that are added to every initial response.
function reader:header(fields)
  core.arg.table(fields, 1, "header")
  py.clear_headers(self.handle)
  for name, value in pairs(fields) do py.add_header(self.handle, core.arg.string(name, 1, "header"), tostring(value)) end
  return true
end

function reader:io() return core.io.wrap(py.io_of(self.handle)) end

function reader:maxage(seconds)
  py.add_header(self.handle, "Cache-Control", "max-age=" .. core.arg.integer(seconds, 1, "maxage"))
  return true
end

-- syntax: reader:lspfilter(app)      serves Lua Server Pages with this application table
function reader:lspfilter(app)
  core.arg.optional(core.arg.table, app, nil, 1, "lspfilter")
  self.app = app
  self.pages = {}
  py.set_pages(self.handle, app ~= nil)
  return true
end

function reader:getapp() return self.app end

-- Makes a method accept the table of a web file manager too: `dir.insert(wfs, child)`.
local function of_directory(name, method)
  return function(self, ...)
    if classes[getmetatable(self)] then return method(self, ...) end
    return method(check_dir(self, 1, name), ...)
  end
end

for _, methods in ipairs{dir, reader} do
  for name, method in pairs(methods) do
    if type(method) == "function" and name:sub(1, 2) ~= "__" then methods[name] = of_directory(name, method) end
  end
end

core.dir = {
  handles = handles, methods = dir, check = check_dir, derive = derive, wrap = wrap,
  name_and_priority = name_and_priority, check_priority = check_priority,
  adopt = function(handle) return wrap(handle, reader_class) end,
}
