-- trace, tracep, print (spec: bas-api §7, runtime §7).
local core, py = ...

local concat, format, getinfo, pack, rawtype, running, select, tostring =
  table.concat, string.format, debug.getinfo, table.pack, core.rawtype, coroutine.running, select, tostring

local quiet = setmetatable({}, {__mode = "k"}) -- coroutines whose traces tracelogger:ontrace does not receive
core.quiet_coroutines = quiet

local function line(...)
  local texts = pack(...)
  for i = 1, texts.n do texts[i] = tostring(texts[i]) end
  return concat(texts, "\t", 1, texts.n)
end

--- Returns "<function> <line>: " of the caller of the calling function; the file replaces a missing name.
local function origin()
  local info = getinfo(3, "Sln")
  return format("%s %d: ", info.name or info.short_src, info.currentline)
end

--- Writes the calling function, its line and the values to the server's trace, at priority 0.
function trace(...)
  local prefix = origin()
  py.trace(0, prefix .. line(...), quiet[running()] or false)
end

--- Like trace, with a priority of 0 to 9: tracep([prefix,] priority, ...). prefix: false leaves out function and line.
function tracep(...)
  local with_prefix, first = true, 1
  if rawtype((...)) == "boolean" then with_prefix, first = (...), 2 end
  local priority = core.arg.integer((select(first, ...)), first, "tracep")
  local prefix = with_prefix and origin() or ""
  py.trace(priority, prefix .. line(select(first + 1, ...)), quiet[running()] or false)
end

--- Prints as in Lua, through Python: C would buffer the output.
function print(...)
  py.print(line(...))
end

local handler

--- ba.seterrh(f): f(message, env) is called for every error in a page; without f there is no handler.
function ba.seterrh(f)
  handler = core.arg.optional(core.arg["function"], f, nil, 1, "seterrh")
end

--- Calls the error handler. env: the request environment. An error in the handler is logged.
function core.report_error(message, env)
  if not handler then return end
  local ok, fault = xpcall(handler, core.traceback, message, env)
  if not ok then core.log_error("error handler failed: " .. fault) end
end
