-- require "SparkplugB": payloads and edge nodes of Sparkplug B (Eclipse Sparkplug 3.0; spec: bas-api §12).
local core = ...

local arg, format, ipairs, isyieldable, pairs, raise, rawtype, setmetatable, xpcall =
  core.arg, string.format, ipairs, core.isyieldable, pairs, core.raise, core.rawtype, setmetatable, xpcall
local find, floor, gettime, match, mathtype = string.find, math.floor, socket.gettime, string.match, math.type

local sparkplug = core.require_sparkplug()

local NAMESPACE <const> = "spBv1.0"
local REBIRTH <const>, BDSEQ <const> = "Node Control/Rebirth", "bdSeq"
local PUBLISH_WILL <const> = 4 -- reason of DISCONNECT with which the broker publishes the NDEATH (MQTT 5, 3.14.2.1)
local OWN_OPTIONS <const> = {metrics = true, onstatus = true, onncmd = true, ondcmd = true}
local INFERRED <const> = {boolean = "Boolean", string = "String"}

local methods = {}
local class = {__index = methods, __name = "sparkplug", __metatable = "sparkplug"}

local function now_ms() return floor(gettime() * 1000) end

local function self_of(value, fname)
  return arg.instance(value, class, 0, fname)
end

local function check_id(value, index, fname)
  arg.string(value, index, fname)
  if value == "" or find(value, "[/+#]") then
    raise(format("bad argument #%s to '%s' (an id without / + # expected, got '%s')", index, fname, value))
  end
  return value
end

-- ---- metrics

local function datatype_of(metric, fname)
  local kind, value = metric.datatype, metric.value
  if rawtype(kind) == "number" then kind = sparkplug.DataType[kind] end
  if kind == nil and value ~= nil then
    kind = INFERRED[rawtype(value)] or mathtype(value) == "integer" and "Int64" or mathtype(value) == "float" and "Double" or nil
  end
  if rawtype(kind) ~= "string" then raise(format("%s: the metric '%s' needs a datatype", fname, metric.name)) end
  return kind
end

-- The metrics of a birth, by name and by alias. Later data may contain only these.
local function birth_metrics(metrics, fname)
  local known = {list = {}, by_name = {}, by_alias = {}}
  for at, metric in ipairs(arg.table(metrics, "metrics", fname)) do
    arg.table(metric, "metrics[" .. at .. "]", fname)
    local copy = {timestamp = now_ms()}
    for name, value in pairs(metric) do copy[name] = value end
    arg.string(copy.name, "name", fname)
    copy.datatype = datatype_of(copy, fname)
    if known.by_name[copy.name] then raise(format("%s: there are two metrics '%s'", fname, copy.name)) end
    if copy.alias ~= nil then
      if known.by_alias[copy.alias] then raise(format("%s: there are two metrics with the alias %s", fname, copy.alias)) end
      known.by_alias[copy.alias] = copy
    end
    if copy.name ~= BDSEQ then
      known.list[#known.list + 1] = copy
      known.by_name[copy.name] = copy
    end
  end
  return known
end

-- Metrics for a data message: with the datatype and alias of the birth.
local function data_metrics(metrics, known, fname)
  local list = {}
  for at, metric in ipairs(arg.table(metrics, "metrics", fname)) do
    arg.table(metric, "metrics[" .. at .. "]", fname)
    local one = metric.name ~= nil and known.by_name[metric.name] or metric.alias ~= nil and known.by_alias[metric.alias]
    if not one then raise(format("%s: the metric '%s' is not in the birth", fname, tostring(metric.name or metric.alias))) end
    local copy = {}
    for name, value in pairs(metric) do copy[name] = value end
    copy.datatype, copy.timestamp = one.datatype, metric.timestamp or now_ms()
    copy.name, copy.alias = not one.alias and one.name or nil, one.alias -- an alias replaces the name
    list[at] = copy
  end
  return list
end

-- Store the values for the next birth.
local function store_values(metrics, known)
  for _, metric in ipairs(metrics) do
    local one = metric.name ~= nil and known.by_name[metric.name] or known.by_alias[metric.alias]
    if not metric.is_historical then one.value, one.timestamp, one.is_null = metric.value, metric.timestamp, metric.is_null end
  end
end

-- ---- messages

-- A payload without its seq. `with_seq` appends it when the payload is sent, since encoding may block. Protobuf permits any order of fields.
local function encoded(metrics)
  return sparkplug.encode{timestamp = now_ms(), metrics = metrics}
end

local function with_seq(data, seq)
  return data .. (seq < 0x80 and string.char(0x18, seq) or string.char(0x18, seq & 0x7F | 0x80, seq >> 7))
end

local function topic_of(self, kind, device)
  local topic = NAMESPACE .. "/" .. self.group .. "/" .. kind .. "/" .. self.node
  return device and topic .. "/" .. device or topic
end

-- Returns true | false without a connection | nil and an error.
local function send(self, kind, device, data)
  local is_connected, word = self.mqtt:publish(topic_of(self, kind, device), with_seq(data, self.seq))
  if is_connected then self.seq = (self.seq + 1) % 256 end
  return is_connected, word
end

-- Wait for births that are being encoded: data must follow them, since they contain the older values.
local function wait_for_births(self)
  while self.is_birthing and isyieldable() do core.sleep(1) end
end

local function node_metrics(self)
  local metrics = {{name = BDSEQ, datatype = "Int64", value = self.bdseq, timestamp = now_ms()}}
  if not self.metrics.by_name[REBIRTH] then
    metrics[2] = {name = REBIRTH, datatype = "Boolean", value = false, timestamp = now_ms()}
  end
  for _, metric in ipairs(self.metrics.list) do metrics[#metrics + 1] = metric end
  return metrics
end

local Birthing = {__close = function(guard) guard.node.is_birthing = false end}

-- Send NBIRTH and the DBIRTH of every device, with no other message between them.
local function send_births(self)
  wait_for_births(self)
  if not self.is_connected or not self.metrics then return false end
  self.is_birthing = true
  local guard <close> = setmetatable({node = self}, Birthing)
  local bdseq, node, devices = self.bdseq, encoded(node_metrics(self)), {}
  for device, known in pairs(self.devices) do devices[#devices + 1] = {device, encoded(known.list)} end
  if not self.is_connected or self.bdseq ~= bdseq then return false end -- the connection changed during the encoding
  self.seq, self.is_online = 0, true
  local done, word = send(self, "NBIRTH", nil, node)
  for _, one in ipairs(devices) do
    if done then done, word = send(self, "DBIRTH", one[1], one[2]) end
  end
  return done, word
end

-- ---- methods

-- syntax: node:nbirth([metrics]) -> true | false without a connection, the births are then sent on connection | nil, error
-- Sends the metrics of the node, followed by the DBIRTH of every device.
function methods:nbirth(metrics)
  self_of(self, "nbirth")
  if metrics ~= nil or not self.metrics then
    local known = birth_metrics(metrics or {}, "nbirth")
    encoded(known.list) -- raises an error for invalid metrics
    self.metrics = known
  end
  return send_births(self)
end

-- syntax: node:dbirth(device, metrics) -> true | false without a connection | nil, error
function methods:dbirth(device, metrics)
  self_of(self, "dbirth")
  check_id(device, 1, "dbirth")
  local known = birth_metrics(metrics, "dbirth")
  local data = encoded(known.list)
  wait_for_births(self)
  self.devices[device] = known
  return self.is_online and send(self, "DBIRTH", device, data)
end

local function data_call(fname, kind, known_of)
  return function(self, device, metrics)
    local known = known_of(self, device)
    wait_for_births(self)
    local list = data_metrics(metrics, known, fname)
    local data = encoded(list)
    store_values(list, known)
    return self.is_online and send(self, kind, device, data)
  end
end

local send_ndata = data_call("ndata", "NDATA", function(self)
  return self.metrics or raise "ndata: the node has no metrics yet; call nbirth first"
end)

local send_ddata = data_call("ddata", "DDATA", function(self, device)
  return self.devices[device] or raise(format("ddata: there is no device '%s'; call dbirth first", device))
end)

-- syntax: node:ndata(metrics) -> true | false without a connection, the next birth then contains the values | nil, error
function methods:ndata(metrics)
  return send_ndata(self_of(self, "ndata"), nil, metrics)
end

-- syntax: node:ddata(device, metrics) -> as ndata
function methods:ddata(device, metrics)
  return send_ddata(self_of(self, "ddata"), arg.string(device, 1, "ddata"), metrics)
end

-- syntax: node:ddeath(device) -> true | false without a connection | nil, error
function methods:ddeath(device)
  self_of(self, "ddeath")
  if not self.devices[arg.string(device, 1, "ddeath")] then raise(format("ddeath: there is no device '%s'", device)) end
  wait_for_births(self)
  self.devices[device] = nil
  return self.is_online and send(self, "DDEATH", device, encoded{})
end

-- syntax: node:status() -> {connected =, online =, bdseq =, seq =}      online: the births were sent
function methods:status()
  self_of(self, "status")
  return {connected = self.is_connected, online = self.is_online, bdseq = self.bdseq, seq = self.seq}
end

-- syntax: node:close() -> whether it was connected        the broker publishes the NDEATH; the node does not reconnect
function methods:close()
  local was_connected = self_of(self, "close").is_connected
  self.is_connected, self.is_online = false, false
  self.mqtt:disconnect(PUBLISH_WILL)
  return was_connected
end

methods.disconnect = methods.close
class.__close = methods.close

-- ---- commands

-- Add the names of metrics that have only an alias.
local function add_names(metrics, known)
  for _, metric in ipairs(metrics) do
    local one = metric.name == nil and metric.alias ~= nil and known and known.by_alias[metric.alias]
    if one then metric.name = one.name end
  end
  return metrics
end

-- Whether metrics request a rebirth, and the other metrics.
local function split_rebirth(metrics)
  local others, is_requested = {}, false
  for _, metric in ipairs(metrics) do
    if metric.name == REBIRTH then is_requested = is_requested or metric.value == true else others[#others + 1] = metric end
  end
  return is_requested, others
end

local function command(self, topic, data)
  local kind, device = match(topic, "^[^/]*/[^/]*/(%u+)/[^/]*/?(.*)$")
  local payload, fault = sparkplug.decode(data)
  if not payload then
    if not self.is_fault_logged then tracep(false, 0, "Sparkplug: " .. topic .. ": " .. fault) end
    self.is_fault_logged = true
    return
  end
  if kind == "DCMD" then
    if self.ondcmd then self.ondcmd(device, add_names(payload.metrics, self.devices[device]), payload) end
    return
  end
  local is_requested, others = split_rebirth(add_names(payload.metrics, self.metrics))
  if is_requested then send_births(self) end
  if self.onncmd and others[1] then self.onncmd(others, payload) end
end

-- ---- the connection

local function will(self)
  local metrics = {{name = BDSEQ, datatype = "Int64", value = self.next_bdseq, timestamp = now_ms()}}
  return {topic = topic_of(self, "NDEATH"), payload = encoded(metrics), qos = 1}
end

-- The result of the application's onstatus; true without one, or when it fails.
local function call_onstatus(self, ...)
  if not self.onstatus then return true end
  local ok, result = xpcall(self.onstatus, core.traceback, ...)
  if ok then return result end
  core.log_error("Sparkplug onstatus failed: " .. result)
  return true
end

local function on_status(self, kind, code, status)
  local is_accepted = kind == "mqtt" and code == "connect" and status.reasoncode == 0
  self.is_connected, self.is_online = false, false
  local result = call_onstatus(self, kind, code, status)
  if not is_accepted or not result then return result end
  core.mqtt.py.discard(self.mqtt.number) -- unsent messages of the previous connection: the births must be first
  self.bdseq, self.next_bdseq = self.next_bdseq, (self.next_bdseq + 1) % 256
  self.mqtt:setwill(will(self)) -- of the next connection
  self.is_connected, self.seq, self.is_fault_logged = true, 0, false
  self.mqtt:subscribe(topic_of(self, "NCMD"), {qos = 1})
  self.mqtt:subscribe(topic_of(self, "DCMD", "#"), {qos = 1})
  send_births(self)
  return true
end

local function mqtt_options(self, op)
  local options = {}
  for name, value in pairs(op) do
    if not OWN_OPTIONS[name] then options[name] = value end
  end
  options.will, options.recbta = will(self), false
  return options
end

-- syntax: SparkplugB.create(addr, group, node [, op]) -> node
-- op: the options of mqttc.create, and metrics, onstatus(kind, code, status), onncmd(metrics, payload), ondcmd(device, metrics, payload)
function sparkplug.create(addr, group, node, op)
  op = arg.optional(arg.table, op, {}, 4, "create")
  local self = {
    group = check_id(group, 2, "create"), node = check_id(node, 3, "create"), devices = {}, seq = 0, bdseq = 0, next_bdseq = 0,
    is_connected = false, is_online = false, is_birthing = false, is_fault_logged = false,
  }
  for _, name in ipairs{"onstatus", "onncmd", "ondcmd"} do
    self[name] = arg.optional(arg["function"], op[name], nil, name, "create")
  end
  if op.metrics ~= nil then
    self.metrics = birth_metrics(op.metrics, "create")
    encoded(self.metrics.list)
  end
  setmetatable(self, class)
  self.mqtt = require "mqttc".create(addr, function(...) return on_status(self, ...) end,
    function(topic, payload) return command(self, topic, payload) end, mqtt_options(self, op))
  core.mqtt.py.end_with_app(self.mqtt.number, PUBLISH_WILL, core.application())
  return self
end

return sparkplug
