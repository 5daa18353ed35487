-- Bounded queue of packets for a client, without a socket: `wake` starts the writer.

local concat = table.concat

local MAX_BYTES <const> = 1 << 20     -- further messages are dropped and counted
local WRITE_BYTES <const> = 1 << 16   -- of packets that are joined to one write
local WRITE_LIMIT_MS <const> = 10000  -- after which the client is disconnected

local Outbox = {}
Outbox.__index = Outbox

--- totals: a table; its field `dropped` is incremented for each dropped packet.
local function new(totals, wake)
  return setmetatable({totals = totals, wake = wake, first = 1, last = 0, bytes = 0, packets = {}}, Outbox)
end

local function append(self, packet)
  self.last, self.bytes = self.last + 1, self.bytes + #packet
  self.packets[self.last] = packet
end

--- Add a packet, or drop it when the queue is full.
function Outbox:put(packet)
  if self.finished then return end
  if self.bytes + #packet <= MAX_BYTES or self.bytes == 0 then return append(self, packet) end
  self.totals.dropped = self.totals.dropped + 1
end

--- Start to write the added packets.
function Outbox:flush()
  if self.last >= self.first then self.wake() end
end

--- Add the last packet, which may be ""; the writer closes the connection after it.
function Outbox:finish(packet)
  if self.finished then return end
  if packet ~= "" then append(self, packet) end
  self.finished = true
  self.wake()
end

--- Remove and return the bytes of the next write; nil when the queue is empty. The caller must then call `written`.
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

--- Whether a write takes longer than 10 s because the client does not read.
function Outbox:is_stuck(now_ms)
  return self.since_ms and now_ms - self.since_ms > WRITE_LIMIT_MS
end

return {new = new}
