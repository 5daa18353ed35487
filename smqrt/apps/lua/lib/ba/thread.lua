-- ba.thread, ba.sleep, ba.clock, ba.exec (spec: bas-api §7, runtime §6).
--
-- A "thread" is a queue of jobs. Jobs run in order as activities, a limited number at a time. A blocking job does not block
-- other activities.
local core, py = ...

local arg, setmetatable, xpcall = core.arg, setmetatable, xpcall

local DEFAULT_THREADS <const> = 3
local MAX_WAITING <const> = 10000 -- bounds the memory of an application that starts a job for each message

local methods = {}
local Queue = core.class("thread", methods)
local queues, last_handle = setmetatable({}, {__mode = "v"}), 0 -- handle -> queue

local function new_queue(threads)
  last_handle = last_handle + 1
  local queue = setmetatable({handle = last_handle, threads = threads, running = 0, first = 1, next = 1, jobs = {}}, Queue)
  queues[last_handle] = queue
  return queue
end

local function waiting(queue)
  return queue.next - queue.first
end

local busy = {} -- handle -> queue with jobs: not collected before they have ended
local advance_ref

--- Schedules the next job for the next turn of the loop, unless `threads` jobs run.
local function advance(queue)
  if waiting(queue) == 0 or queue.running >= queue.threads then
    if queue.running == 0 then busy[queue.handle] = nil end
    return
  end
  busy[queue.handle] = queue
  queue.running = queue.running + 1
  py.soon(advance_ref, queue.handle)
end

local RunGuard = {__close = function(guard) -- __close also runs when the activity is killed
  local queue = guard.queue
  queue.running = queue.running - 1
  advance(queue)
end}

advance_ref = core.ref(function(handle)
  local queue = queues[handle]
  local guard <close> = setmetatable({queue = queue}, RunGuard)
  if waiting(queue) == 0 then return end
  local job = queue.jobs[queue.first]
  queue.jobs[queue.first] = nil
  queue.first = queue.first + 1
  local ok, message = xpcall(job, core.traceback)
  if not ok then core.log_error("Thread job failed: " .. message) end
end)

--- Appends a job and returns the number of waiting jobs. Raises when MAX_WAITING jobs wait.
function methods:run(job)
  local queue = arg.instance(self, Queue, 1, "run")
  arg["function"](job, 2, "run")
  if waiting(queue) >= MAX_WAITING then
    core.raise("thread: limit reached: " .. MAX_WAITING .. " waiting jobs; start fewer jobs or configure more threads")
  end
  queue.jobs[queue.next] = job
  queue.next = queue.next + 1
  advance(queue)
  return waiting(queue)
end

local pool = new_queue(DEFAULT_THREADS)

ba.thread = {}

--- ba.thread.run(f): runs f in the pool and returns the number of waiting jobs.
function ba.thread.run(job)
  return pool:run(arg["function"](job, 1, "run"))
end

--- ba.thread.create(): returns a separate queue that runs one job at a time: queue:run(f).
function ba.thread.create()
  return new_queue(1)
end

--- ba.thread.configure([n]): sets and returns how many jobs of the pool run at a time.
function ba.thread.configure(threads)
  local count = arg.optional(arg.integer, threads, pool.threads, 1, "configure")
  if count < 1 then core.bad_argument(1, "configure", "positive number", threads) end
  pool.threads = count
  for _ = 1, math.min(count, MAX_WAITING) do advance(pool) end
  return count
end

--- ba.thread.dbg(): returns the numbers of running and of waiting jobs of the pool.
function ba.thread.dbg()
  return pool.running, waiting(pool)
end

--- ba.sleep(ms): pauses the calling activity.
function ba.sleep(ms)
  py.sleep(arg.milliseconds(ms, 1, "sleep"))
end

local clock = py.clock

--- ba.clock(): returns the milliseconds of a monotonic clock.
function ba.clock() return clock() end

--- ba.exec(command): returns output and exit code; nil, code, output when the command failed. Blocks only the calling activity.
function ba.exec(command)
  return py.exec(arg.plain(command, 1, "exec"))
end
