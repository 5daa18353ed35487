-- The rules of the bridge: what it connects. Change it, and restart the server.
--
-- A rule maps what begins with `mqtt` to the same with `smq` in its place:
--    way    "in" (MQTT to SMQ), "out" (SMQ to MQTT) or "both"
--    data   "json": objects and arrays (other messages are left out, and counted), or "bytes": anything
-- The first rule that fits counts.

return {
   broker = os.getenv "MQTT_BROKER" or "localhost", -- host, host:port, mqtt://... or mqtts://user:password@host
   options = {clientidentifier = "smqrt-bridge-" .. ba.rndbs(6):gsub(".", function(c) return ("%02x"):format(c:byte()) end)},
   rules = {
      {mqtt = "house/", smq = "home/", way = "both", data = "json"},
      {mqtt = "sensors/", smq = "sensors/", way = "in", data = "bytes"},
      {mqtt = "commands/", smq = "commands/", way = "out", data = "bytes"},
   },
}
