-- The calls that wait for a client inside the process, bounded, and the cosocket that makes them one after the other.

local MAX_BYTES <const> = 1 << 20 -- of messages: then they are dropped, and counted
local MAX_CALLS <const> = 10000

local Inbox = {}
Inbox.__index = Inbox

--- totals: a table whose `dropped` counts.
local function new(totals)
  return setmetatable({totals = totals, calls = {}, sizes = {}, first = 1, last = 0, bytes = 0}, Inbox)
end

local function append(self, size, call)
  self.last, self.bytes = self.last + 1, self.bytes + size
  self.calls[self.last], self.sizes[self.last] = call, size
end

--- Adds a call, of a message of `size` bytes.
function Inbox:put(size, call)
  if self.finished then return end
  local fits = self.bytes + size <= MAX_BYTES or self.bytes == 0
  if fits and self.last - self.first < MAX_CALLS then return append(self, size, call) end
  self.totals.dropped = self.totals.dropped + 1
end

local function take(self)
  local at = self.first
  local call = self.calls[at]
  if not call then return nil end
  self.bytes = self.bytes - self.sizes[at]
  self.calls[at], self.sizes[at], self.first = nil, nil, at + 1
  return call
end

local function run(cosock, self)
  cosock:disable() -- until the application has got the client
  while true do
    local call = take(self)
    if call then
      call()
    elseif self.finished then
      return
    elseif not cosock:disable() then
      return -- the server stops
    end
  end
end

function Inbox:wake()
  if self.runner then self.runner:enable(true) end
end

--- Begins with the calls, soon.
function Inbox:start()
  self.runner = ba.socket.event(run, self)
  ba.timer(function() self:wake() end):set(1, true)
end

--- The calls that wait are dropped; `call` is the last one.
function Inbox:finish(call)
  self.calls, self.sizes, self.first, self.last, self.bytes = {}, {}, 1, 0, 0
  if call then append(self, 0, call) end
  self.finished = true
  self:wake()
end

return {new = new}
