-- The trace logger: a directory that shows the server's trace in a browser (spec: bas-api 4, 17).
local core, py = ...

local tracelogger = {}
local class = core.dir.derive("tracelogger", tracelogger)
local options = {py.options()}

-- syntax: ba.create.tracelogger([name = "tracelogger.service"] [, priority]) -> directory
function ba.create.tracelogger(...)
  local name, priority = core.dir.name_and_priority("tracelogger", ...)
  return core.dir.wrap(py.new(name, core.dir.check_priority(priority, "tracelogger")), class)
end

-- syntax: tracelogger:configure{request=bool, requestheaders=bool, responseheaders=bool, requestbody=bool}
-- What is not given stays as it is, other names are left aside.
function tracelogger:configure(wanted)
  core.arg.table(wanted, 1, "configure")
  local given = {}
  for _, name in ipairs(options) do
    if wanted[name] ~= nil then
      given[#given + 1] = name
      given[#given + 1] = core.arg.boolean(wanted[name], name, "configure")
    end
  end
  return py.configure(self.handle, table.unpack(given))
end
