-- A message and its PUBLISH packets. Most subscribers get the same bytes, which are cached for each protocol version.

local fields = require "mqttbroker.fields"

local char = string.char

local PUBLISH <const>, RETAINED <const> = 0x30, 0x31
local EMPTY <const> = "\0"

local Message = {}
Message.__index = Message

--- forwarded: the encoded properties that subscribers get. plain: a function that returns them as a table for applications.
local function new(topic, payload, retain, forwarded, plain)
  return setmetatable({topic = topic, payload = payload, retain = retain, forwarded = forwarded, plain = plain}, Message)
end

local function packet(header, body)
  return char(header) .. fields.pack_varint(#body) .. body
end

local function packet_3(self)
  return packet(PUBLISH, fields.pack_binary(self.topic) .. self.payload)
end

local function packet_5(self, header, extra)
  local block = self.forwarded .. extra
  block = block == "" and EMPTY or fields.pack_varint(#block) .. block
  return packet(header, fields.pack_binary(self.topic) .. block .. self.payload)
end

--- The PUBLISH packet for a subscriber. identifiers: its encoded subscription identifiers. as_published: keep the retain flag.
function Message:packet(version, identifiers, as_published)
  if version < 5 then
    self.bytes_3 = self.bytes_3 or packet_3(self)
    return self.bytes_3
  end
  if identifiers ~= "" or as_published and self.retain then
    return packet_5(self, as_published and self.retain and RETAINED or PUBLISH, identifiers)
  end
  self.bytes_5 = self.bytes_5 or packet_5(self, PUBLISH, "")
  return self.bytes_5
end

return {new = new, packet = packet}
