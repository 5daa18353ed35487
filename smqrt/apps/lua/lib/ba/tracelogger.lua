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
-- Options that are not given keep their values; unknown names are ignored.
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

local PAUSE_MS <const> = 50 -- between two calls: the callback may itself cause lines

-- Calls f with waiting lines until there are none. Traces of f go to viewers only. An error removes the callback.
local function deliver(handle, number, f)
  local current = coroutine.running()
  local text = py.next_lines(handle, number)
  while text do
    core.quiet_coroutines[current] = true
    local ok, message = xpcall(f, core.traceback, text)
    core.quiet_coroutines[current] = nil
    if not ok then
      py.remove_callback(handle, number)
      return core.log_error("ontrace: the callback failed and was removed: " .. message)
    end
    core.sleep(PAUSE_MS)
    text = py.next_lines(handle, number)
  end
end

-- syntax: tracelogger:ontrace(f(text) | nil) -> true
-- f receives later traces, one or more whole lines a call. nil removes it. A new callback replaces the previous one.
function tracelogger:ontrace(f)
  core.arg.instance(self, class, 1, "ontrace")
  if core.arg.optional(core.arg["function"], f, nil, 2, "ontrace") == nil then return py.ontrace(self.handle) end
  return py.ontrace(self.handle, core.ref(function(handle, number) deliver(handle, number, f) end))
end
