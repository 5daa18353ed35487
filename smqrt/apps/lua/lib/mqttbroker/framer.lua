-- Splitting of the input into packets: `add` data that was read, then call `next` until it returns nil.

local fields = require "mqttbroker.fields"
local refusal = require "mqttbroker.refusal"

local byte, concat, format, sub = string.byte, table.concat, string.format, string.sub

local Framer = {}
Framer.__index = Framer

--- A framer that rejects packets of more than `max_bytes`, before they are complete.
local function new(max_bytes)
  return setmetatable({max_bytes = max_bytes, data = "", at = 1, parts = {}, missing_bytes = 0}, Framer)
end

function Framer:add(data)
  local parts = self.parts
  parts[#parts + 1] = data
  self.missing_bytes = self.missing_bytes - #data
  if self.missing_bytes > 0 then return end
  self.data, self.at, self.parts = concat(parts), 1, {}
end

-- Collect data until `bytes` more have been added, so that a large packet is concatenated once and not at every read.
local function wait_for(self, bytes)
  self.parts, self.missing_bytes = {sub(self.data, self.at)}, bytes
  self.data, self.at = "", 1
end

--- The first byte and the body of the next packet; nil when it is incomplete.
function Framer:next()
  local data, at = self.data, self.at
  if at > #data then return nil end
  local size, from = fields.length(data, at + 1)
  if not size then return wait_for(self, 1) end
  local last = from + size - 1
  if last - at + 1 > self.max_bytes then
    refusal.raise(refusal.TOO_LARGE, format("the packet has more than %d bytes", self.max_bytes))
  end
  if last > #data then return wait_for(self, last - #data) end
  self.at = last + 1
  return byte(data, at), sub(data, from, last)
end

return {new = new}
