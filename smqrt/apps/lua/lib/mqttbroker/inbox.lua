-- Bounded queue of the callbacks of a local client, and the cosocket that runs them in sequence.

local MAX_BYTES <const> = 1 << 20 -- of messages; further ones are dropped and counted
local MAX_CALLS <const> = 10000

local Inbox = {}
Inbox.__index = Inbox

--- totals: a table; its field `dropped` is incremented for each dropped call.
local function new(totals)
  return setmetatable({totals = totals, calls = {}, sizes = {}, first = 1, last = 0, bytes = 0}, Inbox)
end

local function append(self, size, call)
  self.last, self.bytes = self.last + 1, self.bytes + size
  self.calls[self.last], self.sizes[self.last] = call, size
end

--- Add a call. size: bytes of its message.
function Inbox:put(size, call)
  if self.finished then return end
  local fits = self.bytes + size <= MAX_BYTES or self.bytes == 0 -- a single message may be larger
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
  cosock:disable() -- until createClient has returned: callbacks may use the client
  while true do
    local call = take(self)
    if call then
      call()
    elseif self.finished then
      return
    elseif not cosock:disable() then
      return -- the server shuts down
    end
  end
end

function Inbox:wake()
  if self.runner then self.runner:enable(true) end
end

--- Start to run the calls, after the current activity has yielded.
function Inbox:start()
  self.runner = ba.socket.event(run, self)
  ba.timer(function() self:wake() end):set(1, true)
end

--- Discard the queued calls, run `call` if there is one, and end.
function Inbox:finish(call)
  self.calls, self.sizes, self.first, self.last, self.bytes = {}, {}, 1, 0, 0
  if call then append(self, 0, call) end
  self.finished = true
  self:wake()
end

return {new = new}
