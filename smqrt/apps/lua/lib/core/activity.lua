-- References to Lua functions, and the loop that runs them in a pooled coroutine.

local core = ...

local collectgarbage, cpu_clock, running = collectgarbage, os.clock, coroutine.running
local error, format, find, gsub, sub, yield = error, string.format, string.find, string.gsub, string.sub, core.yield
local getmetatable, rawtype, select, tostring, traceback, xpcall = core.getmetatable, core.rawtype, select, tostring, debug.traceback, xpcall

local overtime = core.overtime
local MAX_VALUES <const> = core.max_values
-- The frames of `loop`, at the end of a traceback: "upvalue 'xpcall'" in Lua 5.5, "function 'xpcall'" in 5.4.
local LOOP_FRAMES <const> = "\n\t%[C%]: in %l+ 'xpcall'\n\tsmqrt/apps/lua/lib/"
local LIBRARY_FRAME <const> = "\n\tsmqrt/apps/lua/lib/[^\n]*"

local refs, last = {}, 0

--- Keep `value` for Python; return its reference, an integer. References are never reused, so a late call of a freed one is an error.
function core.ref(value)
  last = last + 1
  refs[last] = value
  return last
end

--- Free a reference.
function core.unref(ref)
  refs[ref] = nil
end

--- The value of a reference; nil after `unref`.
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

-- A traceback without the frames of this library.
local function application_frames(trace)
  local at = find(trace, LOOP_FRAMES)
  if at then trace = sub(trace, 1, at - 1) end
  trace = gsub(trace, "\n\t%[C%]: in %l+ 'error'(" .. LIBRARY_FRAME .. ")", "%1")
  return (gsub(gsub(trace, LIBRARY_FRAME .. "\n\t%(%.%.%.tail calls%.%.%.%)", ""), LIBRARY_FRAME, ""))
end

--- The message of an error, followed by Lua's traceback without the frames of this library. A handler for xpcall.
function core.traceback(value)
  local text = application_frames(traceback(describe(value), 2))
  if value ~= nil and value == core.inner_error then
    text = text .. "\ninside the coroutine, " .. core.inner_trace
  end
  core.inner_error, core.inner_trace = nil, nil
  return text
end

local handler = core.traceback

-- Yield the result of a job; return the next job.
local function next_job(ok, ...)
  if overtime.case then overtime.disarm() end
  if select("#", ...) > MAX_VALUES then return yield(false, "too many values returned to the server") end
  return yield(ok, ...)
end

local function freed()
  error("a freed Lua function was called", 0)
end

-- Run jobs in sequence: `resume` passes (ref, arguments) in, `yield` passes (true, results) or (false, message) out.
local function loop(ref, ...)
  return loop(next_job(xpcall(refs[ref] or freed, handler, ...)))
end

function core.loop(ref, ...)
  core.enter_activity()
  return loop(ref, ...)
end

-- With Lua's default step multiplier, 100 units of work for 16 new bytes, a body of 4 MiB would collect a large heap in one step.
-- With a multiplier of 4, a cycle ends when the heap has grown by half. Lua 5.5 ignores these numbers; its default has no such steps.
collectgarbage("incremental", 150, 4)

local TIME_SLICE_S <const> = 0.004 -- of CPU time, before other activities run

--- Restart the collector, which `Vm.hold_collector` stops, and run a whole cycle in time slices.
function core.collect()
  collectgarbage"restart"
  local until_s = cpu_clock() + TIME_SLICE_S
  while not collectgarbage("step", 0) do
    if cpu_clock() >= until_s then
      core.pause()
      until_s = cpu_clock() + TIME_SLICE_S
    end
  end
end

-- References that exist when Python first calls Lua. `first` is the first job of each coroutine: it returns the address
-- of the coroutine's state.
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
