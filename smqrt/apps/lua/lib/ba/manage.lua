-- Functions of `mako` that create, start, stop and remove applications (spec: bas-api §3, runtime §2.1).
local core, py = ...

local format, pack, rawequal, rawtype, type = string.format, table.pack, rawequal, core.rawtype, core.type

local FIELDS <const> = 6 -- of each application in the results of py.apps

-- syntax: mako.getapps() -> {path, ...}      in load order; getapps()[name]: {name, path, priority, running,
-- error, app, io, dir}, where "" is the name of the root
function mako.getapps()
  local paths, by_name, flat = {}, {}, pack(py.apps())
  for at = 1, flat.n, FIELDS do
    local number, name, path, priority, running, fault = table.unpack(flat, at, at + FIELDS - 1)
    local app = core.apps.table_of(number)
    paths[#paths + 1] = path
    by_name[name] = {name = name, path = path, priority = priority, running = running, error = fault, app = app}
    if running and app then by_name[name].io, by_name[name].dir = app.io, app.dir end
  end
  return setmetatable(paths, {__index = by_name}) -- names by index only: a loop sees just the paths
end

-- Returns the number of an application. which: its position in getapps(), its table or its name; nil for the root.
-- As in Mako, an invalid position or table raises; an unknown name returns 0.
local function number_of(which, fname)
  local flat, kind = pack(py.apps()), type(which)
  for at = 1, flat.n, FIELDS do
    local number, name = flat[at], flat[at + 1]
    if rawequal(core.apps.table_of(number), which) or name == (which or "") then return number end
  end
  if kind == "string" and not tonumber(which) or which == nil then return 0 end
  if kind == "table" then core.bad_argument(1, fname, "table of an application", which) end
  local position, count = core.arg.integer(which, 1, fname), flat.n // FIELDS
  if position < 1 or position > count then
    core.raise(format("bad argument #1 to '%s' (1 to %d expected, got %d)", fname, count, position))
  end
  return flat[(position - 1) * FIELDS + 1]
end

-- syntax: mako.createapp([name] [, priority], path | io [, start = true]) -> its table, dir | nil, message
-- Without a name, an application is mounted under the last part of its path.
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
  local app = core.apps.table_of(number) or {}
  return app, app.dir
end

-- syntax: mako.startapp(position | app | name) -> true | nil, message      stopapp, reloadapp, removeapp: the same
-- message: "running" of startapp, "stopped" of stopapp; "notfound", and "locked" while the application starts or stops
-- stopapp, removeapp: false and the error when onunload fails; the application is stopped nevertheless
function mako.startapp(which) return py.start(number_of(which, "startapp")) end

function mako.stopapp(which) return py.stop(number_of(which, "stopapp")) end

function mako.reloadapp(which) return py.reload(number_of(which, "reloadapp")) end

function mako.removeapp(which)
  local number = number_of(which, "removeapp")
  local done, message = py.remove(number)
  if done == nil then return nil, message end
  core.apps.forget(number)
  return done, message
end
