-- Applications: each has a table that is the environment of its .preload (spec: runtime §2, §3).
local core, py = ...

local collectgarbage, pairs, pcall, rawget, select = collectgarbage, pairs, pcall, rawget, select
local setmetatable, type, xpcall = setmetatable, core.rawtype, xpcall

local getinfo, getupvalue = debug.getinfo, debug.getupvalue

local MAX_UPVALUES <const> = 255 -- of a Lua function
local MAX_LEVELS <const> = 100 -- of the stack that are searched for an application

local numbers = setmetatable({}, {__mode = "k"}) -- the table of an application -> its number
local applications = {} -- number -> {table =, anchors =}; the table stays the same when the application starts again

local function module_loader(app, io)
  local loaded = {}
  return function(name)
    name = core.arg.string(name, 1, "appreq")
    if loaded[name] == nil then
      local path = ".lua/" .. name:gsub("%.", "/") .. ".lua"
      local chunk, message = io:loadfile(path, app)
      if not chunk then core.raise("appreq '" .. name .. "': " .. path .. ": " .. message) end
      local value = chunk(name)
      loaded[name] = value == nil and true or value
    end
    return loaded[name]
  end
end

local function fill(app, io, dir)
  app.app, app.io, app.dir = app, io, dir
  app.appreq = module_loader(app, io)
  return setmetatable(app, {__index = _G})
end

-- Runs .preload, when there is one. The application keeps the root directories that .preload inserts.
local function run_preload(application)
  local app = application.table
  local chunk, fault = app.io:loadfile(".preload", app)
  if not chunk then return fault == "notfound", fault:find(":", 1, true) and fault or ".preload can't be read: " .. fault end
  local outer = core.anchors
  core.anchors = application.anchors
  local done, message = xpcall(chunk, core.traceback)
  core.anchors = outer
  return done, message
end

local entries = {}

-- Runs .preload, when there is one, and enables pages. -> true | false, message with file, line and traceback
-- entry: its index in `apps` of mako.conf, nil when it is not listed there
-- ...: the hubs that its .preload.py has created: `name, integer, ...`
function entries.load(number, io, reader, entry, ...)
  local application = applications[number] or {table = {}}
  applications[number] = application
  application.anchors = {}
  application.dir = core.dir.adopt(reader)
  numbers[application.table] = number
  local app = fill(application.table, core.io.wrap(io), application.dir)
  for at = 1, select("#", ...), 2 do
    local name, hub = select(at, ...)
    app[name] = core.python_hub(hub)
  end
  if entry then
    local done, message = pcall(core.configured.application, entry, app)
    if not done then return false, message end
  end
  local done, message = run_preload(application)
  if done then application.dir:lspfilter(app) end
  return done, message
end

-- Calls onunload. -> nil | message with file, line and traceback
function entries.stop(number)
  local application = applications[number]
  local onunload = application and rawget(application.table, "onunload")
  if type(onunload) ~= "function" then return nil end
  local done, message = xpcall(onunload, core.traceback)
  return not done and message or nil
end

-- Empties the application's table: remaining functions (such as a timer) read only nil.
function entries.clear(number)
  local application = applications[number]
  if not application then return end
  local app = application.table
  application.anchors, application.dir = nil, nil
  setmetatable(app, nil)
  for name in pairs(app) do app[name] = nil end
  collectgarbage()
end

-- Sets up the parts of mako.conf besides applications. tracelogger: starts the trace logger in any case.
function entries.configure(tracelogger) core.configured.server(tracelogger) end

core.apps = {}

local function number_of(environment)
  if numbers[environment] then return numbers[environment] end
  local request = type(environment) == "table" and rawget(environment, "request") -- of a page or directory function
  return core.getmetatable(request) == core.exchange.class and numbers[rawget(request, "app_")] or nil
end

local function number_of_function(f)
  for at = 1, MAX_UPVALUES do
    local name, value = getupvalue(f, at)
    if not name then return nil end
    if name == "_ENV" then return value ~= nil and number_of(value) or nil end
  end
end

--- Returns the number of the application whose code is running, nil without one. In timers, threads and cosockets Python does not
-- have it: then the environments of the functions on the stack are searched. For `Services.scope_of`.
function core.application()
  local known = py.known_application()
  if known ~= false then return known end
  for level = 2, MAX_LEVELS do
    local info = getinfo(level, "Sf")
    if not info then return nil end
    local number = not core.is_library(info) and number_of_function(info.func)
    if number then return number end
  end
end

--- Returns the table of the application to which a function belongs, or else of the one whose code is running; nil without one.
function core.app_of(f)
  return core.apps.table_of(number_of_function(f) or core.application())
end

--- Returns the table of an application, nil before its first start.
function core.apps.table_of(number)
  local application = applications[number]
  return application and application.table
end

--- Removes an application that will not start again.
function core.apps.forget(number) applications[number] = nil end

for name, entry in pairs(entries) do py.entry(name, core.ref(entry)) end
