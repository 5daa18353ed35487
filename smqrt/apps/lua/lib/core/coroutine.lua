-- Blocking calls, and a coroutine library that supports them.
--
-- A blocking call yields an Op to Python. In a coroutine of an application, the Op reaches `deliver` of the resuming coroutine first.
-- `deliver` yields it again, one level up, and passes the result back. `coroutine.resume` returns only what the application yields.

local core = ...

local resume, yield, status, running = coroutine.resume, coroutine.yield, coroutine.status, coroutine.running
local close, create, isyieldable = coroutine.close, coroutine.create, coroutine.isyieldable
local check, error, failure, raise, traceback = core.check, error, core.failure, core.raise, debug.traceback
local getinfo, select, setmetatable = debug.getinfo, select, setmetatable

local TOO_MANY <const> = "too many arguments to a blocking call"
local BOUNDARY <const> = "blocking call across a C boundary (a sort comparator, a gsub callback, a finalizer or the like)"

core.yield = yield -- for the activity loop; applications use `library.yield`
core.isyieldable = isyieldable -- whether a blocking call is possible

local ops = {}                                    -- set of the Ops that may be yielded to Python
local busy = setmetatable({}, {__mode = "k"})     -- coroutines that the application must not resume: activities, and those inside an Op
local inner_of = setmetatable({}, {__mode = "k"}) -- coroutine -> the coroutine that it resumed and whose Op is not complete

-- lupa copies yielded values to the main stack without a check of its size, which is 40.
local MAX_VALUES <const> = 30
core.max_values = MAX_VALUES

--- Return a blocking function for the Op `op`.
function core.blocking(op)
  ops[op] = true
  return function(...)
    if not isyieldable() then raise(BOUNDARY) end
    if select("#", ...) > MAX_VALUES then raise(TOO_MANY) end
    return check(yield(op, ...))
  end
end

--- Mark the running coroutine as an activity, which only Python resumes.
function core.enter_activity()
  busy[running()] = true
end

--- Close an activity and the coroutines that it resumed, innermost first, with their `<close>` variables. Errors are logged.
function core.close_activity(co)
  local inner = inner_of[co]
  inner_of[co] = nil
  if inner then core.close_activity(inner) end
  if status(co) == "dead" then return end
  local ok, message = close(co)
  if not ok then core.log_error("error while a killed activity was closed: " .. core.describe(message)) end
end

--- The position of the innermost application frame of a waiting activity, as "file:line", for reports.
function core.position_of(co)
  while inner_of[co] do co = inner_of[co] end
  for level = 0, 100 do
    local info = getinfo(co, level, "Sl")
    if not info then break end
    if not core.is_library(info) then return info.short_src .. ":" .. info.currentline end
  end
  return "the library"
end

local continue

-- Return the results of `resume`; when they are an Op, yield it first and resume `co` with its results.
local function deliver(co, ok, op, ...)
  if not (ok and ops[op]) then return ok, op, ... end
  if not isyieldable() then return deliver(co, resume(co, failure, BOUNDARY)) end
  local me = running()
  busy[co], inner_of[me] = true, co
  return continue(co, me, yield(op, ...))
end

continue = function(co, me, ...)
  busy[co], inner_of[me] = nil, nil
  return deliver(co, resume(co, ...))
end

local library = {create = create, running = running}

function library.resume(co, ...)
  if busy[co] then return false, "cannot resume non-suspended coroutine" end
  return deliver(co, resume(co, ...))
end

function library.yield(...)
  if busy[running()] then error("attempt to yield from outside a coroutine", 2) end
  return yield(...)
end

function library.status(co)
  local state = status(co)
  return state == "suspended" and busy[co] and "normal" or state
end

function library.isyieldable(...)
  return isyieldable(...) and not busy[(...) or running()]
end

function library.close(co)
  if busy[co] then error("cannot close a normal coroutine", 2) end
  return close(co)
end

local function unwrap(co, ok, ...)
  if ok then return ... end
  local message = ...
  if status(co) == "dead" then
    core.inner_error, core.inner_trace = message, traceback(co)
    close(co)
  end
  error(message, 0)
end

function library.wrap(f)
  local co = create(f)
  return function(...) return unwrap(co, library.resume(co, ...)) end
end

for name, fn in pairs(library) do coroutine[name] = fn end
