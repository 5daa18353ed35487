-- References to Lua functions, and the loop that runs them in a pooled coroutine.

local core = ...

local collectgarbage, cpu_clock, running = collectgarbage, os.clock, coroutine.running
local error, format, find, gsub, sub, yield = error, string.format, string.find, string.gsub, string.sub, core.yield
local getmetatable, rawtype, select, tostring, traceback, xpcall = core.getmetatable, core.rawtype, select, tostring, debug.traceback, xpcall

local overtime = core.overtime
local MAX_VALUES <const> = core.max_values
local BOTTOM <const> = "\n\t%[C%]: in %l+ 'xpcall'\n\tsmqrt/apps/lua/lib/" -- Lua 5.5 says "upvalue" where 5.4 says "function"

local refs, last = {}, 0

--- Keeps `value` for Python and returns the integer for Python. A number is never given out twice.
function core.ref(value)
  last = last + 1
  refs[last] = value
  return last
end

--- Forgets a reference.
function core.unref(ref)
  refs[ref] = nil
end

--- The value of a reference, nil when it was forgotten.
function core.deref(ref)
  return refs[ref]
end

--- The text of an error value.
local function describe(value)
  if rawtype(value) == "string" then return value end
  local meta = getmetatable(value)
  if rawtype(value) == "number" or meta and meta.__tostring then return tostring(value) end
  return format("(error object is a %s value)", core.type(value))
end

core.describe = describe

local FRAME <const> = "\n\tsmqrt/apps/lua/lib/[^\n]*"

--- A traceback without what is the library's: the bottom, by which Python came in, and the frames in between.
local function own_frames(trace)
  local at = find(trace, BOTTOM)
  if at then trace = sub(trace, 1, at - 1) end
  trace = gsub(trace, "\n\t%[C%]: in %l+ 'error'(" .. FRAME .. ")", "%1")
  return (gsub(gsub(trace, FRAME .. "\n\t%(%.%.%.tail calls%.%.%.%)", ""), FRAME, ""))
end

--- The message of an error with Lua's traceback below it, frames of the library left out: for a handler of xpcall.
function core.traceback(value)
  local text = own_frames(traceback(describe(value), 2))
  if value ~= nil and value == core.inner_error then
    text = text .. "\ninside the coroutine, " .. core.inner_trace
  end
  core.inner_error, core.inner_trace = nil, nil
  return text
end

local handler = core.traceback

local function wait(ok, ...)
  if overtime.case then overtime.disarm() end
  if select("#", ...) > MAX_VALUES then return yield(false, "too many values returned to the server") end
  return yield(ok, ...)
end

local function missing()
  error("a Lua function was called that was freed before", 0)
end

--- Runs one job after the other: resume passes (ref, arguments) in, yield passes (true, results) or (false, message) out.
local function loop(ref, ...)
  return loop(wait(xpcall(refs[ref] or missing, handler, ...)))
end

function core.loop(ref, ...)
  core.enter_activity()
  return loop(ref, ...)
end

-- Lua's own pace is 100 units of collecting for 16 bytes of new memory: a body of 4 MiB would pay for all of a large heap
-- in one step. With this one a cycle takes until the heap has grown by half. Lua 5.5 ignores the numbers; its own pace has no such steps.
collectgarbage("incremental", 150, 4)

local COLLECTING_S <const> = 0.004 -- of CPU, then others run

--- The other half of `Vm.hold_collector`: a whole cycle of the collector, in portions.
function core.collect()
  collectgarbage"restart"
  local until_s = cpu_clock() + COLLECTING_S
  while not collectgarbage("step", 0) do
    if cpu_clock() >= until_s then
      core.pause()
      until_s = cpu_clock() + COLLECTING_S
    end
  end
end

-- What Python calls by reference from the start. `first` is the job with which a coroutine enters the loop; it
-- shows the address of the coroutine's state.
core.entries = {
  first = core.ref(function() return format("%p", running()) end),
  free = core.ref(core.unref),
  close = core.ref(core.close_activity),
  relax = core.ref(overtime.relax),
  where = core.ref(core.position_of),
  hold = core.ref(function() collectgarbage"stop" end),
  collect = core.ref(function() collectgarbage("collect") end),
  memory = core.ref(function() return collectgarbage("count") * 1024 // 1 end),
}
