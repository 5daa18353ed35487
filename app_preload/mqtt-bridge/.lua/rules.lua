-- Rules of the bridge. Restart the server after a change.
--
-- A rule maps MQTT topics that begin with `mqtt` to SMQ topics that begin with `smq` instead:
--    way      direction: "in" (MQTT to SMQ), "out" (SMQ to MQTT) or "both"
--    data     "json": objects and arrays (other messages are dropped and counted), or "bytes": any data
--    qos      of messages to MQTT: 0, 1 (the default) or 2
--    retain   whether the broker keeps messages to MQTT for later subscribers
-- The first rule that applies is used.

return {
   broker = os.getenv "MQTT_BROKER", -- mqtt://user:password@host, a list of such addresses; or nil: no other broker
   name = os.getenv "MQTT_BRIDGE" or "smqrt-bridge", -- client identifier; each bridge at a broker needs its own
   mark = os.getenv "MQTT_BRIDGE_MARK", -- of messages to MQTT; bridges of one cluster need the same; the default is the name
   mqtt = os.getenv "MQTT_BRIDGE_CLIENTS" == "true", -- whether MQTT clients may connect to this server too; without a broker they always may
   options = {queuesize = 10000, reconnectmax = 5},
   rules = {
      {mqtt = "house/", smq = "home/", way = "both", data = "json"},
      {mqtt = "sensors/", smq = "sensors/", way = "in", data = "bytes"},
      {mqtt = "commands/", smq = "commands/", way = "out", data = "bytes"},
   },
}
