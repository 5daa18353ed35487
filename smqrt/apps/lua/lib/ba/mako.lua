-- The `mako` table: functions of the server process (spec: bas-api §3).
local core, py = ...

local env = {py.environment()}

mako = {
  argv = {py.argv()},
  env = {},
  cfgdir = py.cfgdir(),
  cfgfname = py.cfgfname(),
  cwd = py.cwd(),
  daemon = false,
  date = py.date(),
  execpath = py.execpath(),
  version = py.version(),
}
mako.worker, mako.workers = py.worker() -- index from 0, and number of processes (help: workers)
local rtl = py.rtl()
if rtl then
  core.rtl = core.dir.adopt(rtl) -- for the lifetime of the server: without its object the directory would be removed from the tree
  mako.rtldir = core.rtl
end
for at = 1, #env, 2 do mako.env[env[at]] = env[at + 1] end

setmetatable(mako, {__index = function(_, name) -- not known before the server listens
  if name == "port" or name == "sslport" then return py.port(name == "sslport") end
end})

function mako.dos2unix(path) return core.arg.string(path, 1, "dos2unix") end

-- syntax: mako.loadcerts() -> true | nil, message      reads the certificates of the TLS port again, as SIGHUP does
function mako.loadcerts()
  if core.isyieldable() then return py.load_certificates() end
  return py.load_certificates_here()
end

-- Makes require search `.lua/` of an io as well. The modules get the global environment.
function mako.createloader(io)
  core.io.check(io, 1, "createloader")
  core.add_loader(function(path) return core.io.source(io, ".lua/" .. path .. ".lua") end)
  return true
end

mako.sharkclient = ba.sharkclient -- the older name

local exit_functions = {} -- in the order of their registration

-- syntax: mako.onexit(f, set)      set: true registers f, false removes it
function mako.onexit(f, set)
  core.arg["function"](f, 1, "onexit")
  for at = #exit_functions, 1, -1 do
    if exit_functions[at] == f then table.remove(exit_functions, at) end
  end
  if set ~= false then exit_functions[#exit_functions + 1] = f end
  return true
end

if py.can_stop() then
  -- syntax: mako.exit([status])
  function mako.exit(status) py.stop(status == nil and 0 or core.arg.integer(status, 1, "exit")) end
end

py.attach(core.ref(function()
  for _, f in ipairs(exit_functions) do
    local done, message = xpcall(f, core.traceback)
    if not done then py.report("onexit: " .. message) end
  end
end))
