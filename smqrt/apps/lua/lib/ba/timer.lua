-- ba.timer (spec: bas-api §7).
--
-- A timer repeats while its function returns true or yields true. A function that yields continues after the yield at the next tick.
local core, py = ...

local arg, create, resume, status, setmetatable = core.arg, coroutine.create, coroutine.resume, coroutine.status, setmetatable
local raise, traceback = core.raise, debug.traceback

local known = setmetatable({}, {__mode = "v"}) -- handle -> timer: one without references is collected, and stops
local anchored = {}                            -- handle -> timer, of the active ones that were set with anchor
local last = 0

local methods = {}
local Timer = core.class("timer", methods)

local function halt(timer)
  timer.changes = timer.changes + 1
  anchored[timer.handle] = nil
  return py.stop(timer.handle) or nil
end

--- Ends the timer for good: later calls raise.
local function fail(timer, co, message)
  halt(timer)
  timer.failed = true
  core.log_error("Timer callback failed: " .. traceback(co, core.describe(message)))
end

local function tick(timer)
  if timer.running then return end -- the run before is blocked in a call and takes longer than the interval
  local co, changes = timer.suspended or create(timer.callback), timer.changes
  timer.running, timer.suspended = true, nil
  local ok, again = resume(co)
  timer.running = false
  if not ok then return fail(timer, co, again) end
  if status(co) == "suspended" then timer.suspended = co end
  if again ~= true and changes == timer.changes then halt(timer) end
end

local tick_ref = core.ref(function(handle)
  local timer = known[handle]
  if timer then tick(timer) end
end)

local function self_of(timer, fname)
  arg.instance(timer, Timer, 1, fname)
  if timer.failed then raise("timer:" .. fname .. ": the callback of this timer failed") end
  return timer
end

--- Starts the timer, or restarts it. anchor: it is kept without a Lua reference. now: it also ticks immediately.
function methods:set(ms, anchor, now)
  local timer = self_of(self, "set")
  local interval_ms = arg.milliseconds(ms, 2, "set")
  anchor, now = arg.optional(arg.boolean, anchor, false, 3, "set"), arg.optional(arg.boolean, now, false, 4, "set")
  timer.changes = timer.changes + 1
  anchored[timer.handle] = anchor and timer or nil
  py.start(timer.handle, tick_ref, interval_ms, now)
  return true
end

--- Gives an active timer a new interval, counted from now: true, or nil when it is not active.
function methods:reset(ms)
  local timer = self_of(self, "reset")
  local interval_ms = arg.milliseconds(ms, 2, "reset")
  if not py.active(timer.handle) then return nil end
  timer.changes = timer.changes + 1
  py.start(timer.handle, tick_ref, interval_ms, false)
  return true
end

--- Stops the timer: true, or nil when it was not active.
function methods:cancel()
  return halt(self_of(self, "cancel"))
end

Timer.__gc = function(timer) py.stop(timer.handle) end
Timer.__close = function(timer) halt(timer) end

--- ba.timer(f): a timer that calls f, not yet set.
function ba.timer(callback)
  arg["function"](callback, 1, "timer")
  last = last + 1
  local timer = setmetatable({handle = last, callback = callback, changes = 0}, Timer)
  known[last] = timer
  return timer
end
