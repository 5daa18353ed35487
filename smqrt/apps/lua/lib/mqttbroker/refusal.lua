-- Reason codes (MQTT 5 §2.4), and refusals: errors that reject a packet and disconnect only the client that sent it.

local Refusal = {__name = "refusal", __tostring = function(refusal) return refusal.text end}

local refusal = {
  NORMAL = 0x00,
  WITH_WILL = 0x04,
  NO_SUBSCRIPTION = 0x11,
  UNSPECIFIED = 0x80,
  MALFORMED = 0x81,
  PROTOCOL_ERROR = 0x82,
  VERSION = 0x84,
  CLIENT_IDENTIFIER = 0x85,
  CREDENTIALS = 0x86,
  NOT_AUTHORIZED = 0x87,
  UNAVAILABLE = 0x88,
  SHUTTING_DOWN = 0x8B,
  AUTHENTICATION_METHOD = 0x8C,
  KEEP_ALIVE = 0x8D,
  TAKEN_OVER = 0x8E,
  TOPIC_FILTER = 0x8F,
  TOPIC_NAME = 0x90,
  TOPIC_ALIAS = 0x94,
  TOO_LARGE = 0x95,
  QUOTA = 0x97,
  RETAIN = 0x9A,
  QOS = 0x9B,
  SHARED = 0x9E,
  IDLE = 0xA0,
  WILDCARD = 0xA2,
}

--- The return codes of a 3.1.1 CONNACK. For other reasons, a 3.1.1 connection is closed without a packet.
refusal.CONNACK_3 = {
  [refusal.VERSION] = 1,
  [refusal.CLIENT_IDENTIFIER] = 2,
  [refusal.UNAVAILABLE] = 3,
  [refusal.CREDENTIALS] = 4,
  [refusal.NOT_AUTHORIZED] = 5,
}

--- Raise a refusal. text: the reason in English.
function refusal.raise(code, text)
  error(setmetatable({code = code, text = text}, Refusal), 0)
end

function refusal.malformed(text) refusal.raise(refusal.MALFORMED, text) end
function refusal.protocol_error(text) refusal.raise(refusal.PROTOCOL_ERROR, text) end

--- The reason code and text of a raised value, and whether it is a refusal. Any other value is a bug of the broker.
function refusal.of(value)
  if getmetatable(value) == Refusal then return value.code, value.text, true end
  return refusal.UNSPECIFIED, "the broker failed to handle the packet", false
end

return refusal
