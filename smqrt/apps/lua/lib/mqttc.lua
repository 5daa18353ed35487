-- require "mqttc": the MQTT 5 client (spec: smq §8).
local core = ...

local arg, mqtt = core.arg, core.mqtt

local module = {}

local function trace_topic(topic) trace("MQTT message without a callback:", topic) end

-- syntax: create(addr | connect(mqtt, op), onstatus(type, code, status) [, onpub(topic, payload, properties, cpt)] [, op] [, properties])
-- -> mqtt
function module.create(addr, onstatus, onpub, op, props)
  if core.type(onpub) == "table" then onpub, op, props = nil, onpub, op end
  op = arg.optional(arg.table, op, {}, 4, "create")
  local self = {
    onstatus = arg["function"](onstatus, 2, "create"),
    onpub = arg.optional(arg["function"], onpub, trace_topic, 3, "create"),
    recbta = op.recbta ~= false,
  }
  return mqtt.create(self, addr, op, arg.optional(arg.table, props, nil, 5, "create"), 5)
end

-- The form for MQTT 3.1.1: see mqtt3c.
function module.connect(...)
  return require "mqtt3c".connect(...)
end

return module
