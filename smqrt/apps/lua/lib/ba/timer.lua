-- ba.timer (spec: bas-api §7).
--
-- A timer repeats while its function returns true or yields true. A function that yields continues after the yield at the next tick.
local core, py = ...

local arg, create, resume, status, setmetatable = core.arg, coroutine.create, coroutine.resume, coroutine.status, setmetatable
local raise, traceback = core.raise, debug.traceback

local timers = setmetatable({}, {__mode = "v"}) -- handle -> timer; a timer without references is collected and stops
local anchored = {}                             -- handle -> active timer that was set with anchor: not collected
local last_handle = 0

local methods = {}
local Timer = core.class("timer", methods)

local function halt(timer)
  timer.changes = timer.changes + 1
  anchored[timer.handle] = nil
  return py.stop(timer.handle) or nil
end

--- Stops a timer whose callback failed: its methods raise from then on.
local function fail(timer, co, message)
  halt(timer)
  timer.failed = true
  core.log_error("Timer callback failed: " .. traceback(co, core.describe(message)))
end

local function tick(timer)
  if timer.running then return end -- the previous tick still waits in a blocking call
  local co, changes = timer.suspended or create(timer.callback), timer.changes
  timer.running, timer.suspended = true, nil
  local ok, again = resume(co)
  timer.running = false
  if not ok then return fail(timer, co, again) end
  if status(co) == "suspended" then timer.suspended = co end
  if again ~= true and changes == timer.changes then halt(timer) end -- not when the callback itself set the timer
end

local tick_ref = core.ref(function(handle)
  local timer = timers[handle]
  if timer then tick(timer) end
end)

local function self_of(timer, fname)
  arg.instance(timer, Timer, 1, fname)
  if timer.failed then raise("timer:" .. fname .. ": the callback of this timer failed") end
  return timer
end

--- Starts or restarts the timer. anchor: keeps the timer without a Lua reference. now: ticks immediately as well.
function methods:set(ms, anchor, now)
  local timer = self_of(self, "set")
  local interval_ms = arg.milliseconds(ms, 2, "set")
  anchor, now = arg.optional(arg.boolean, anchor, false, 3, "set"), arg.optional(arg.boolean, now, false, 4, "set")
  timer.changes = timer.changes + 1
  anchored[timer.handle] = anchor and timer or nil
  py.start(timer.handle, tick_ref, interval_ms, now)
  return true
end

--- Restarts an active timer with a new interval. Returns true, or nil when it is not active.
function methods:reset(ms)
  local timer = self_of(self, "reset")
  local interval_ms = arg.milliseconds(ms, 2, "reset")
  if not py.active(timer.handle) then return nil end
  timer.changes = timer.changes + 1
  py.start(timer.handle, tick_ref, interval_ms, false)
  return true
end

--- Stops the timer. Returns true, or nil when it was not active.
function methods:cancel()
  return halt(self_of(self, "cancel"))
end

Timer.__gc = function(timer) py.stop(timer.handle) end
Timer.__close = function(timer) halt(timer) end

--- ba.timer(f): returns a timer that calls f once it is set.
function ba.timer(callback)
  arg["function"](callback, 1, "timer")
  last_handle = last_handle + 1
  local timer = setmetatable({handle = last_handle, callback = callback, changes = 0}, Timer)
  timers[last_handle] = timer
  return timer
end
