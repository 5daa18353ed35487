-- Termination of activities that exceed the CPU time or the memory limit.
--
-- The watchdog (watchdog.py) calls `arm` from a debug hook in the running coroutine. `arm` sets another hook, and that one raises the error.
-- The watchdog's hook must not: it has Python frames on the C stack, and an error must not pass through them.

local core = ...

local clock, format, getinfo, is_library, raise, running = os.clock, string.format, debug.getinfo, core.is_library, core.raise, coroutine.running
local min, setmetatable, sethook = math.min, setmetatable, debug.sethook

local INSTRUCTIONS <const> = 1000 -- between two calls of the hook
local GRACE_S <const> = 1         -- of CPU time, or the limit if that is less, for code that catches the error to close files or respond

-- case: the number of the overdue run that the watchdog reported; nil without one.
local overtime = {}
core.overtime = overtime

local armed = setmetatable({}, {__mode = "k"}) -- coroutine -> case
local limit_s, grace_ends_s -- limit_s: as `seconds` of `arm`

local function live_heap_mib()
  collectgarbage("collect") -- most of a heap over the limit may be garbage
  return collectgarbage("count") / 1024
end

-- Code of this library is not interrupted: shared state could be left inconsistent. Such code always ends.
local function stop()
  if armed[running()] ~= overtime.case then return sethook() end
  if grace_ends_s and clock() < grace_ends_s or is_library(getinfo(2, "S")) then return end
  if limit_s < 0 and not grace_ends_s and live_heap_mib() < -limit_s then return sethook() end
  if grace_ends_s then sethook(stop, "", 1) end -- a pcall has caught the error: raise it again at every instruction
  grace_ends_s = grace_ends_s or clock() + (limit_s < 0 and GRACE_S or min(GRACE_S, limit_s))
  if limit_s < 0 then raise(format("not enough memory: Lua has more than %d MiB; see the setting limits.lua_memory_mib", -limit_s)) end
  raise(format("this ran for %.14g s without yielding and blocked all other activities; call ba.sleep regularly in long loops", limit_s))
end

-- seconds: the limit of CPU time. A negative number: Lua exceeds its memory limit of -seconds MiB.
local function arm(case, seconds)
  if case ~= overtime.case then overtime.case, grace_ends_s = case, nil end
  local me, is_late = running(), grace_ends_s and clock() >= grace_ends_s
  sethook(stop, "", (is_late or armed[me] == case) and 1 or INSTRUCTIONS)
  armed[me], limit_s = case, seconds
end

debug.getregistry()["smqrt.arm"] = arm

--- Remove the hook of the running coroutine: its activity has ended, and the coroutine is reused.
function overtime.disarm()
  local me = running()
  if armed[me] then
    armed[me] = nil
    sethook()
  end
end

--- End the case: the event loop has turned, so armed coroutines that are suspended may run again.
function overtime.relax()
  overtime.case = nil
end
