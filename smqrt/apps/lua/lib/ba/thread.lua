-- ba.thread, ba.sleep, ba.clock, ba.exec (spec: bas-api §7, runtime §6).
--
-- A "thread" is a queue whose jobs run as activities, a limited number at a time and in order: a job that blocks does not block others.
local core, py = ...

local arg, setmetatable, xpcall = core.arg, setmetatable, xpcall

local DEFAULT_THREADS <const> = 3
local MAX_WAITING <const> = 10000 -- publishers may cause a job for each message

local methods = {}
local Queue = core.class("thread", methods)
local queues, last = setmetatable({}, {__mode = "v"}), 0 -- handle -> queue

local function new_queue(threads)
  last = last + 1
  local queue = setmetatable({handle = last, threads = threads, running = 0, first = 1, next = 1, jobs = {}}, Queue)
  queues[last] = queue
  return queue
end

local function waiting(queue)
  return queue.next - queue.first
end

local function take(queue)
  local job = queue.jobs[queue.first]
  queue.jobs[queue.first] = nil
  queue.first = queue.first + 1
  return job
end

local busy = {} -- keeps queues with work alive
local advance_ref

--- Lets the next job begin in the next turn of the loop, when a thread is free.
local function advance(queue)
  if waiting(queue) == 0 or queue.running >= queue.threads then
    if queue.running == 0 then busy[queue.handle] = nil end
    return
  end
  busy[queue.handle] = queue
  queue.running = queue.running + 1
  py.soon(advance_ref, queue.handle)
end

local Turn = {__close = function(turn) -- also when the activity is killed: the thread is free again
  local queue = turn.queue
  queue.running = queue.running - 1
  advance(queue)
end}

advance_ref = core.ref(function(handle)
  local queue = queues[handle]
  local turn <close> = setmetatable({queue = queue}, Turn)
  if waiting(queue) == 0 then return end
  local ok, message = xpcall(take(queue), core.traceback)
  if not ok then core.log_error("Thread job failed: " .. message) end
end)

--- Appends a job and returns how many wait. An error when MAX_WAITING do.
function methods:run(job)
  local queue = arg.instance(self, Queue, 1, "run")
  arg["function"](job, 2, "run")
  if waiting(queue) >= MAX_WAITING then
    core.raise("thread: " .. MAX_WAITING .. " jobs wait already; begin fewer, or configure more threads")
  end
  queue.jobs[queue.next] = job
  queue.next = queue.next + 1
  advance(queue)
  return waiting(queue)
end

local pool = new_queue(DEFAULT_THREADS)

ba.thread = {}

--- ba.thread.run(f): runs f in the pool and returns how many jobs wait.
function ba.thread.run(job)
  return pool:run(arg["function"](job, 1, "run"))
end

--- ba.thread.create(): a queue of its own whose jobs run one after the other: queue:run(f).
function ba.thread.create()
  return new_queue(1)
end

--- ba.thread.configure([n]): sets how many jobs of the pool run at a time; returns the number.
function ba.thread.configure(threads)
  local count = arg.optional(arg.integer, threads, pool.threads, 1, "configure")
  if count < 1 then core.bad_argument(1, "configure", "positive number", threads) end
  pool.threads = count
  for _ = 1, math.min(count, MAX_WAITING) do advance(pool) end
  return count
end

--- ba.thread.dbg(): jobs of the pool that run, and that wait.
function ba.thread.dbg()
  return pool.running, waiting(pool)
end

--- ba.sleep(ms): waits; other activities run.
function ba.sleep(ms)
  py.sleep(arg.milliseconds(ms, 1, "sleep"))
end

--- ba.clock(): milliseconds, never going back.
local clock = py.clock

function ba.clock() return clock() end

--- ba.exec(command): output and exit code; nil, code, output when it failed. Blocks the caller only.
function ba.exec(command)
  return py.exec(arg.plain(command, 1, "exec"))
end
