-- The trace logger: a directory that shows the server's trace in a browser (spec: bas-api §4, §17).
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

local PAUSE_MS <const> = 50 -- between two calls of a callback whose work is logged in turn

-- Calls f with what waits, until nothing does; f's own traces are for viewers only. An error ends it.
local function deliver(handle, number, f)
  local own = coroutine.running()
  local text = py.heard(handle, number)
  while text do
    core.quiet_coroutines[own] = true
    local ok, message = xpcall(f, core.traceback, text)
    core.quiet_coroutines[own] = nil
    if not ok then
      py.ended(handle, number)
      return core.log_error("ontrace: the callback failed and was removed: " .. message)
    end
    core.sleep(PAUSE_MS)
    text = py.heard(handle, number)
  end
end

-- syntax: tracelogger:ontrace(f(text) | nil) -> true
-- f gets what is traced from now on: whole lines, one or several. nil ends it. One callback at a time, the latest.
function tracelogger:ontrace(f)
  core.arg.instance(self, class, 1, "ontrace")
  if core.arg.optional(core.arg["function"], f, nil, 2, "ontrace") == nil then return py.ontrace(self.handle) end
  return py.ontrace(self.handle, core.ref(function(handle, number) deliver(handle, number, f) end))
end
