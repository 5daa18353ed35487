-- Outbox: a bounded queue of packets for a client. It has no socket: `wake` notifies the writer.

local concat = table.concat

local MAX_BYTES <const> = 1 << 20   -- then messages are dropped, and counted
local WRITE_BYTES <const> = 1 << 16 -- in one write
local STUCK_MS <const> = 10000      -- for one write

local Outbox = {}
Outbox.__index = Outbox

--- totals: a table whose `dropped` counts for all clients.
local function new(totals, wake)
  return setmetatable({totals = totals, wake = wake, first = 1, last = 0, bytes = 0, packets = {}}, Outbox)
end

local function append(self, packet)
  self.last, self.bytes = self.last + 1, self.bytes + #packet
  self.packets[self.last] = packet
end

--- Adds a packet; it is dropped when the client reads too slowly.
function Outbox:put(packet)
  if self.finished then return end
  if self.bytes + #packet <= MAX_BYTES or self.bytes == 0 then return append(self, packet) end
  self.totals.dropped = self.totals.dropped + 1
end

--- Has what was added written.
function Outbox:flush()
  if self.last >= self.first then self.wake() end
end

--- Adds the last packet, which may be empty; then the connection ends.
function Outbox:finish(packet)
  if self.finished then return end
  if packet ~= "" then append(self, packet) end
  self.finished = true
  self.wake()
end

--- The next packet to write, or nil. The caller calls `written` afterwards.
function Outbox:take(now_ms)
  local packets, first, size = self.packets, self.first, 0
  local at = first
  while at <= self.last and (size == 0 or size + #packets[at] <= WRITE_BYTES) do
    size, at = size + #packets[at], at + 1
  end
  if at == first then return nil end
  local bytes = concat(packets, "", first, at - 1)
  for i = first, at - 1 do packets[i] = nil end
  self.first, self.since_ms = at, now_ms
  return bytes
end

function Outbox:written(bytes)
  self.bytes, self.since_ms = self.bytes - bytes, nil
end

--- Whether a write takes longer than 10 s: the client does not read.
function Outbox:is_stuck(now_ms)
  return self.since_ms and now_ms - self.since_ms > STUCK_MS
end

return {new = new}
