-- Ends an activity that computes for too long without giving way.
--
-- The watchdog (watchdog.py) calls `arm` in the coroutine that runs, from a debug hook. `arm` sets a hook of Lua's own in the coroutine, and
-- that raises the error: an error must not pass through the frames of Python that are on the C stack in the watchdog's.

local core = ...

local clock, format, getinfo, is_library, raise, running = os.clock, string.format, debug.getinfo, core.is_library, core.raise, coroutine.running
local min, setmetatable, sethook = math.min, setmetatable, debug.sethook

local INSTRUCTIONS <const> = 1000 -- between two looks
local GRACE_S <const> = 1         -- or the limit, of computing, for whoever catches the error: to close, to answer, to end

-- case: the number of the case that is dealt with, nil as long as nothing is wrong.
local overtime = {}
core.overtime = overtime

local armed = setmetatable({}, {__mode = "k"}) -- coroutine -> the case
local limit_s, grace_ends_s

local function whole_heap() -- of what is too much, most may be garbage
  collectgarbage("collect")
  return collectgarbage("count") / 1024
end

-- Lua's library is left alone: it may be in the middle of something that others depend on. It always ends.
local function stop()
  if armed[running()] ~= overtime.case then return sethook() end
  if grace_ends_s and clock() < grace_ends_s or is_library(getinfo(2, "S")) then return end
  if limit_s < 0 and not grace_ends_s and whole_heap() < -limit_s then return sethook() end
  if grace_ends_s then sethook(stop, "", 1) end -- its pcalls have caught the error: from now on each gets no further than the next instruction
  grace_ends_s = grace_ends_s or clock() + (limit_s < 0 and GRACE_S or min(GRACE_S, limit_s))
  if limit_s < 0 then raise(format("not enough memory: Lua has more than %d MiB; see the setting limits.lua_memory_mib", -limit_s)) end
  raise(format("this ran for %.14g s without giving way, and everybody else waited; let long loops call ba.sleep now and then", limit_s))
end

-- seconds: how long one may compute; below 0, how many MiB all may have, which are exceeded.
local function arm(case, seconds)
  if case ~= overtime.case then overtime.case, grace_ends_s = case, nil end
  local me, is_late = running(), grace_ends_s and clock() >= grace_ends_s
  sethook(stop, "", (is_late or armed[me] == case) and 1 or INSTRUCTIONS)
  armed[me], limit_s = case, seconds
end

debug.getregistry()["smqrt.arm"] = arm

--- The running activity has ended; its coroutine is used again.
function overtime.disarm()
  local me = running()
  if armed[me] then
    armed[me] = nil
    sethook()
  end
end

--- A new turn of the loop: armed coroutines that wait start again.
function overtime.relax()
  overtime.case = nil
end
