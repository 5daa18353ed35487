-- require "mqttbroker": an MQTT 3.1.1 and 5 broker for QoS 0 (spec: smq §10).

local broker = require "mqttbroker.broker"
local options = require "mqttbroker.options"
local python = require "mqttbroker.python"

--- Start a broker: create([port] [,op]). Returns it, or nil and the error of the socket. Invalid options raise an error.
local function create(port, op)
  local settings, fault = options.parse(port, op)
  if settings and settings.auth == true then fault = python.fault_of_server() end
  if fault then error(fault, 2) end
  return broker.start(settings)
end

return {create = create}
