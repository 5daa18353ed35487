-- Management of applications by applications (spec: bas-api 3, runtime 2.1).
local core, py = ...

local pack, rawequal, rawtype, type = table.pack, rawequal, core.rawtype, core.type

-- syntax: mako.getapps() -> {[name] = {name, path, priority, running, error, app, io, dir}, ...}      "" is the root's name
function mako.getapps()
  local all, flat = {}, pack(py.apps())
  for at = 1, flat.n, 6 do
    local number, name, path, priority, running, fault = table.unpack(flat, at, at + 5)
    local app = core.apps.table_of(number)
    all[name] = {name = name, path = path, priority = priority, running = running, error = fault, app = app}
    if running and app then all[name].io, all[name].dir = app.io, app.dir end
  end
  return all
end

-- The number of an application that is given by its name or its table; nil is the root.
local function number_of(which, fname)
  if which ~= nil and type(which) ~= "table" then which = core.arg.string(which, 1, fname) end
  local flat = pack(py.apps())
  for at = 1, flat.n, 6 do
    local number, name = flat[at], flat[at + 1]
    if rawequal(core.apps.table_of(number), which) or name == (which or "") then return number end
  end
  return 0
end

-- syntax: mako.createapp([name] [, priority], path | io [, start = true]) -> its table | nil, message
-- Without a name a path is mounted under its last part.
function mako.createapp(...)
  local name, priority, source, start = core.dir.name_and_priority("createapp", ...)
  if source == nil and rawtype((...)) == "string" then
    name, source = name:gsub("/+$", ""):match("([^/]*)$"):gsub("%.[^.]*$", ""), name
  end
  core.dir.check_priority(priority, "createapp")
  local io = type(source) == "userdata" and core.io.check(source, 3, "createapp") or nil
  local path = io and "" or core.arg.string(source, 3, "createapp")
  local number, message = py.create(name, priority, path, io, start ~= false)
  if not number then return nil, message end
  return core.apps.table_of(number) or {}
end

-- syntax: mako.startapp(name | app) -> true | nil, message      stopapp, reloadapp, removeapp: the same
-- startapp: "running"; stopapp: "stopped"; all: "notfound", and "locked" while it is being started or stopped
function mako.startapp(which) return py.start(number_of(which, "startapp")) end

function mako.stopapp(which) return py.stop(number_of(which, "stopapp")) end

function mako.reloadapp(which) return py.reload(number_of(which, "reloadapp")) end

function mako.removeapp(which)
  local number = number_of(which, "removeapp")
  local done, message = py.remove(number)
  if not done then return nil, message end
  core.apps.forget(number)
  return true
end
