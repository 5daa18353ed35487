-- Rules of the bridge. Restart the server after a change.
--
-- A rule maps MQTT topics that begin with `mqtt` to SMQ topics that begin with `smq` instead:
--    way    direction: "in" (MQTT to SMQ), "out" (SMQ to MQTT) or "both"
--    data   "json": objects and arrays (other messages are dropped and counted), or "bytes": any data
-- The first rule that applies is used.

return {
   broker = os.getenv "MQTT_BROKER" or "localhost", -- host, host:port, mqtt://... or mqtts://user:password@host
   options = {clientidentifier = "smqrt-bridge-" .. ba.rndbs(6):gsub(".", function(c) return ("%02x"):format(c:byte()) end)},
   rules = {
      {mqtt = "house/", smq = "home/", way = "both", data = "json"},
      {mqtt = "sensors/", smq = "sensors/", way = "in", data = "bytes"},
      {mqtt = "commands/", smq = "commands/", way = "out", data = "bytes"},
   },
}
