-- require "smq.hub": SMQ brokers (spec: smq §2). Python identifies each broker and each client by an integer.
local core, py = ...

local arg, ref, exchange = core.arg, core.ref, core.exchange
local cpu_clock = os.clock
local gmatch, pairs, rawget, select, setmetatable, sub, tostring, type, unpack, xpcall =
  string.gmatch, pairs, rawget, select, setmetatable, string.sub, tostring, type, string.unpack, xpcall

local PUBLISH <const> = ">I2BI4I4I4"     -- length, type, tid, ptid, subtid
local HEADER_BYTES <const> = 15
local FRAMES_PER_CLOCK <const> = 8       -- frames that are handled between two reads of the clock
local TIME_SLICE_S <const> = 0.004       -- of CPU time, before other activities run

-- ---- clients

local peers = {}                                   -- integer -> peer table, while connected
local number_of = setmetatable({}, {__mode = "k"}) -- socket -> integer

-- key, value, key, value, ... as a table
local function table_of_pairs(...)
  local names = {}
  for at = 1, select("#", ...) - 1, 2 do
    local key, value = select(at, ...)
    names[key] = value
  end
  return names
end

local peer_meta = {
  __index = function(self, key)
    local sock = rawget(self, "sock")
    if key == "dropped" then return py.peer_dropped(number_of[sock]) end
    if key == "user" then return (py.peer_user(number_of[sock])) end
    if key == "groups" then
      local user, groups = py.peer_user(number_of[sock])
      if not user then return nil end
      local list = {}
      for group in gmatch(groups, "[^,]+") do list[#list + 1] = group end
      return list
    end
    if key ~= "topics" then return nil end
    local tids, topics = py.peer_topics(number_of[sock]), {}
    for at = 1, #tids, 4 do topics[unpack(">I4", tids, at)] = sock end
    return next(topics) and topics or nil
  end,
}

local phantoms = setmetatable({}, {__mode = "k"}) -- peer table of a client that is connected to another node -> its integer

local phantom_meta = {
  __index = function(self, key)
    if key == "phantom" then return true end
    if key == "user" then return (py.peer_user(phantoms[self])) end
    return nil
  end,
}

-- The peer table of a client of another node. It has no socket; iterations over peers return false instead.
local function phantom_of(number, tid, uid, info, node)
  local peer = setmetatable({tid = tid, uid = uid, info = info, node = node}, phantom_meta)
  peers[number], phantoms[peer] = peer, number
  return peer
end

-- The peer table of a client, the same one while it is connected; nil when it is no longer connected.
local function peer_of(number)
  local peer = peers[number]
  if not peer then
    local tid, uid, info, node = py.peer(number)
    if not tid then return nil end
    if node then return phantom_of(number, tid, uid, info, node) end
    local socket = core.socket.new(py.socket(number))
    number_of[socket] = number
    peer = setmetatable({sock = socket}, peer_meta)
    peers[number] = peer
  end
  if not peer.tid or peer.tid == 0 then peer.tid, peer.uid, peer.info = py.peer(number) end
  return peer
end

py.on_forget(ref(function(number)
  local sock = peers[number] and rawget(peers[number], "sock")
  if sock then core.socket.forget(sock) end
  peers[number] = nil
end))

local infos = setmetatable({}, {__mode = "k"}) -- peer -> info table of authenticate and onconnect

-- The names and values at the positions `from` to `to` of a list, as a table.
local function table_of_range(list, from, to)
  local names = {}
  for at = from, to, 2 do names[list[at]] = list[at + 1] end
  return names
end

local function describe(number, peer)
  local facts = {py.origin(number)}
  local queries, session = facts[5], py.session(number)
  return {
    seed = facts[1], arg = core.deref(facts[2]), url = facts[3],
    restored = facts[3] == "", -- a request never has an empty path
    uid = peer.uid, info = peer.info, uname = peer.user or facts[4], sock = peer.sock, session = session and ba.session(session) or false,
    data = table_of_range(facts, 6, 5 + queries), header = table_of_range(facts, 6 + queries, #facts),
  }
end

local function info_of(number)
  local peer = peer_of(number)
  local info = infos[peer] or describe(number, peer)
  infos[peer] = info
  return info, peer
end

-- ---- callbacks, as Python calls them

-- The variables for the functions of applications have the names of the callbacks, because Lua's traceback shows them.

-- Call `handle` for each message of a batch. An error is logged, and the remaining messages are handled.
local function each_frame(batch, what, handle)
  local at, size, count, until_s = 1, #batch, 0, cpu_clock() + TIME_SLICE_S
  local function walk()
    while at < size do
      local from = at
      count = count + 1
      if count % FRAMES_PER_CLOCK == 0 and cpu_clock() >= until_s then
        core.pause()
        until_s = cpu_clock() + TIME_SLICE_S
      end
      local length, _, tid, ptid, subtid = unpack(PUBLISH, batch, from)
      at = from + length
      handle(sub(batch, from + HEADER_BYTES, at - 1), ptid, tid, subtid, from, at - 1)
    end
  end
  while at < size do
    local ok, message = xpcall(walk, core.traceback)
    if not ok then py.log_error(what, message) end
  end
end

-- The frames of a batch that onpublish accepts: true for all, else a string. mqtt: the attributes of messages of an MQTT client.
local function accepted_frames(onpublish, what, batch, peer, mqtt)
  local accepted, count, bytes = {}, 0, 0
  each_frame(batch, what, function(data, ptid, tid, subtid, from, to)
    if onpublish(data, ptid, tid, subtid, peer, mqtt) then
      count, bytes = count + 1, bytes + to - from + 1
      accepted[count] = sub(batch, from, to)
    end
  end)
  return bytes == #batch or table.concat(accepted)
end

local adapters = {}

function adapters.authenticate(authenticate, what)
  return function(credentials, number)
    local code, reason = authenticate(credentials, (info_of(number)))
    if math.type(code) ~= "integer" or code < 0 or code > 6 then
      if code ~= nil then
        local shown = type(code) == "string" and string.format("%q", code) or tostring(code)
        py.log_error(what, "a code from 0 to 6 is needed, not " .. shown)
      end
      return 6, ""
    end
    return code, reason and tostring(reason) or ""
  end
end

function adapters.mqttauth(mqttauth, what)
  return function(method, data, number)
    local answer, more, user = mqttauth(method, data, peer_of(number))
    local kind = type(answer)
    if answer ~= nil and kind ~= "string" and kind ~= "boolean" then
      py.log_error(what, "data, a boolean or nil is needed, not a " .. kind)
      answer = false
    end
    return answer, more ~= nil and tostring(more) or nil, user ~= nil and tostring(user) or nil
  end
end

function adapters.permittop(permittop)
  return function(topic, issub, number)
    local permitted = permittop(topic, issub, peer_of(number))
    return permitted and true or false
  end
end

function adapters.permitfilter(permitfilter)
  return function(filter, number)
    local permitted = permitfilter(filter, peer_of(number))
    return permitted and true or false
  end
end

function adapters.permitsubtop(permitsubtop)
  return function(subtopic, number)
    local permitted = permitsubtop(subtopic, peer_of(number))
    return permitted and true or false
  end
end

function adapters.onconnect(onconnect)
  return function(etid, number)
    local info, peer = info_of(number)
    infos[peer] = nil -- frees the header fields of the request
    onconnect(etid, info, peer)
  end
end

function adapters.onclose(onclose)
  return function(etid, number, word, reason)
    local peer = peer_of(number)
    onclose(etid, peer.sock, peer, word or 0, reason)
  end
end

function adapters.onpublish(onpublish, what)
  local load = core.table_codec.load
  return function(batch, tid, ptid, number, attributes)
    return accepted_frames(onpublish, what, batch, peer_of(number), attributes and load(attributes) or nil)
  end
end

function adapters.ondrop(ondrop, what)
  return function(batch, tid, ptid, number)
    local peer = peer_of(number)
    each_frame(batch, what, function(data, sender, topic, subtid) ondrop(data, sender, topic, subtid, peer) end)
  end
end

function adapters.onnode(onnode)
  return function(number, event, why) onnode(number, event, why) end
end

function adapters.onmqttgap(onmqttgap)
  return function(id, lost, number, node) onmqttgap(id, lost, number and peer_of(number), node) end
end

function adapters.log(log)
  return function(number, text)
    local peer = number and peer_of(number)
    log(peer and peer.sock, text)
  end
end

local smq = {}
local python = {} -- the methods of a hub that Python created; they may block, since its callbacks may
local class = core.class("smq", smq)
local python_class = core.class("smq", python)
local handles = setmetatable({}, {__mode = "k"})

local function handle(self)
  local number = handles[self]
  if not number then core.raise("bad self (a broker made by create is expected; call its methods with ':')") end
  return number
end

class.__gc = function(self)
  if handles[self] then py.release(handles[self]) end
end
python_class.__gc = class.__gc

-- Log the keys of a table of options that are not options.
local function warn_of_unknown(op, known, what)
  for key in pairs(op) do
    if not known[key] then tracep(false, 0, core.unknown_option(what, key, known)) end
  end
end

-- ---- methods that the table in smqrt/broker/broker.py declares

local function destination(value, index, fname)
  if type(value) == "number" then return arg.integer(value, index, fname) end
  return arg.string(value, index, fname)
end

-- kind of an argument -> its check
local checks = {
  flag = function(value) return value and true or false end,
  name = arg.string, number = arg.integer, destination = destination, payload = core.payload,
  ["function"] = function(value, index, fname) return ref(arg["function"](value, index, fname)) end,
}

local function optional(check, default)
  return function(value, index, fname)
    if value == nil then return default end
    return check(value, index, fname)
  end
end

-- kind of a result -> the conversion from the values that Python returns to those that applications get
local results = {counts = table_of_pairs}

function results.names(names)
  local at = 1
  return function()
    if at > #names then return nil end
    local tid, text
    tid, text, at = unpack(">I4s4", names, at)
    return tid, text
  end
end

function results.peer(number) return number and peer_of(number) end

function results.peers(numbers)
  local at, number = 1, nil
  return function()
    while at < #numbers do
      number, at = unpack(">I8", numbers, at)
      local peer = peer_of(number)
      if peer then return peer.sock or false, peer end
    end
  end
end

-- One function for each number of arguments: a generic one with `...` would create a table at every call.
local bind = {
  [0] = function(call) return function(self) return call(handle(self)) end end,
  function(call, fname, check) return function(self, a) return call(handle(self), check(a, 1, fname)) end end,
  function(call, fname, check1, check2)
    return function(self, a, b) return call(handle(self), check1(a, 1, fname), check2(b, 2, fname)) end
  end,
  [3] = function(call, fname, check1, check2, check3)
    return function(self, a, b, c) return call(handle(self), check1(a, 1, fname), check2(b, 2, fname), check3(c, 3, fname)) end
  end,
  [4] = function(call, fname, check1, check2, check3, check4)
    return function(self, a, b, c, d)
      return call(handle(self), check1(a, 1, fname), check2(b, 2, fname), check3(c, 3, fname), check4(d, 4, fname))
    end
  end,
}

-- Add a method. result: the kind of its result. `...`: kind, is optional, default of each argument.
local function declare(methods, call, fname, result, ...)
  local arguments = {}
  for at = 1, select("#", ...), 3 do
    local kind, is_optional, default = select(at, ...)
    local check = checks[kind]
    arguments[#arguments + 1] = is_optional and optional(check, default) or check
  end
  local convert = results[result]
  local converted = convert and function(...) return convert(call(...)) end or call
  methods[fname] = bind[#arguments](converted, fname, table.unpack(arguments))
end

-- The functions of an application's publish: `smq:publish(data, topic [, subtopic [, ptid]])`, or with a table of options
-- for MQTT clients in place of the sub-topic.
local publish_options = {subtopic = true, ptid = true, qos = true, retain = true, expiry = true, properties = true}
local optional_destination, optional_number = optional(destination), optional(arg.integer)

local function publisher(call, call_mqtt)
  return function(self, data, topic, subtopic, ptid)
    if type(subtopic) ~= "table" then
      return call(handle(self), core.payload(data, 1, "publish"), destination(topic, 2, "publish"),
        optional_destination(subtopic, 3, "publish"), optional_number(ptid, 4, "publish"))
    end
    local op = subtopic
    warn_of_unknown(op, publish_options, "smq.publish")
    local properties = op.properties ~= nil and core.table_codec.dump(arg.table(op.properties, "3.properties", "publish")) or nil
    return call_mqtt(handle(self), core.payload(data, 1, "publish"), destination(topic, 2, "publish"),
      optional_destination(op.subtopic, "3.subtopic", "publish"), optional_number(op.ptid, "3.ptid", "publish"),
      optional_number(op.qos, "3.qos", "publish"), op.retain and true or false,
      arg.optional(arg.number, op.expiry, nil, "3.expiry", "publish"), properties)
  end
end

for fname in py.methods():gmatch "%S+" do
  declare(smq, py[fname], fname, py.method(fname))
  declare(python, py["python_" .. fname], fname, py.method(fname))
end

smq.publish = publisher(py.publish, py.publish_mqtt)
python.publish = publisher(py.python_publish, py.python_publish_mqtt)

-- ---- methods that differ from those in Python

-- syntax: smq:connect(request [,arg])      blocks until the handshake is complete
local function check_request(request)
  if getmetatable(request) ~= "request" then core.bad_argument(1, "connect", "request", request) end
end

function smq.connect(self, request, value)
  local number = handle(self)
  check_request(request)
  local value_ref = value ~= nil and ref(value) or nil
  py.connect(number, exchange.handle_of(request), value_ref)
  if value_ref then core.unref(value_ref) end
  request.sealed = true
end

local scalars = {["nil"] = true, boolean = true, number = true, string = true}

function python.connect(self, request, value)
  local number = handle(self)
  check_request(request)
  if not scalars[type(value)] then core.bad_argument(2, "connect", "nil, boolean, number or string", value) end
  py.connect(number, exchange.handle_of(request), value)
  request.sealed = true
end

function smq.sock2peer(self, socket)
  local number = number_of[socket]
  return number and py.belongs(handle(self), number) and peer_of(number) or nil
end

-- syntax: smq:close()     closes all clients without a Disconnect, so that they reconnect; blocks while the journal is written
function smq.close(self) py.close(handle(self)) end

-- A callback that calls onmsg with decoded JSON, or the global handler with the data unchanged when it is not JSON.
local function decoding(number, onmsg, deliver_default)
  local logged_s -- one line per second, so that publishers cannot fill the log
  return function(data, ptid, tid, subtid, attributes)
    local value = core.json_value(data)
    if value == nil then
      local now_s = os.time()
      if now_s ~= logged_s then
        logged_s = now_s
        tracep(false, 5, "SMQ: a message to " .. tid .. " is not JSON; it is delivered to the global onmsg")
      end
      deliver_default(number, data, ptid, tid, subtid)
    else
      if value == ba.json.null then value = nil end
      if attributes then onmsg(value, ptid, tid, subtid, attributes) else onmsg(value, ptid, tid, subtid) end
    end
  end
end

-- A callback that calls onmsg with the attributes of a message of an MQTT client as a table, at a hub that accepts these clients.
local function with_attributes(number, onmsg)
  if not py.accepts_mqtt(number) then return onmsg end
  local load = core.table_codec.load
  return function(data, ptid, tid, subtid, attributes)
    if attributes then onmsg(data, ptid, tid, subtid, load(attributes)) else onmsg(data, ptid, tid, subtid) end
  end
end

-- syntax: smq:onmsg(onmsg(data, ptid, tid, subtid [, attributes]))
local function global_handler(call)
  return function(self, onmsg)
    local number = handle(self)
    onmsg = arg.optional(arg["function"], onmsg, nil, 1, "onmsg")
    call(number, onmsg and ref(with_attributes(number, onmsg)))
  end
end
smq.onmsg, python.onmsg = global_handler(py.onmsg), global_handler(py.python_onmsg)

local subscribe_options = {onmsg = true, subtopic = true, json = true, once = true, filter = true}

-- syntax: smq:subscribe(topic [,{onmsg = f, subtopic = name | number, json = bool, once = bool}])   -> tid
-- syntax: smq:subscribe {filter = filter, onmsg = f, ...}   -> 0
local function subscribe(self, topic, op, call, deliver_default)
  local number = handle(self)
  if type(topic) == "table" and op == nil then topic, op = nil, topic end
  op = arg.optional(arg.table, op, {}, 2, "subscribe")
  warn_of_unknown(op, subscribe_options, "smq.subscribe")
  local f = arg.optional(arg["function"], op.onmsg, nil, "2.onmsg", "subscribe")
  local filter = arg.optional(arg.string, op.filter, nil, "2.filter", "subscribe")
  local target = not (filter and topic == nil) and destination(topic, 1, "subscribe") or nil
  if filter and target then core.raise "bad argument #1 to 'subscribe' (subscribe to a topic or to a filter, not to both)" end
  local subtopic = arg.optional(destination, op.subtopic, nil, "2.subtopic", "subscribe")
  if f and op.json then f = decoding(number, f, deliver_default) end
  return call(number, target, f and ref(with_attributes(number, f)), subtopic, not not op.once, filter)
end

function smq.subscribe(self, topic, op) return subscribe(self, topic, op, py.subscribe, py.deliver_default) end
function python.subscribe(self, topic, op) return subscribe(self, topic, op, py.python_subscribe, py.python_deliver_default) end

-- syntax: for topic, data, attributes in smq:retained([filter]) do ... end    the names are read first; blocks
function smq.retained(self, filter)
  local number, load = handle(self), core.table_codec.load
  local names, at, name = py.retained_names(number, arg.optional(arg.string, filter, "", 1, "retained")), 1, nil
  return function()
    while at <= #names do
      name, at = unpack(">s4", names, at)
      local data, attributes = py.retained_message(number, name)
      if data then return name, data, load(attributes) end
    end
  end
end

-- syntax: smq:deleteretained(filter)    -> number of deleted messages; blocks
function smq.deleteretained(self, filter)
  return py.delete_retained(handle(self), arg.string(filter, 1, "deleteretained"))
end

-- syntax: smq:journal()   -> {rows = n, bytes = n, skipped = n, ...} | nil without a journal
function smq.journal(self)
  local list = table.pack(py.journal(handle(self)))
  return list[1] and table_of_pairs(table.unpack(list, 1, list.n))
end

for _, fname in ipairs {"sock2peer", "close", "journal", "retained", "deleteretained"} do python[fname] = smq[fname] end

-- The Lua object of a hub that Python created, by its integer.
function core.python_hub(number)
  local self = setmetatable({}, python_class)
  handles[self] = number
  return self
end

-- ---- the module

local values = {
  "keepidle", "keepintv", "readtmo", "queuesize", "budget", "maxnames", "clientnames", "auth", "name", "keep", "rndtid", "persist", "slow",
  "cluster", "observe", "mqtt",
}
local callbacks = {
  "authenticate", "mqttauth", "permittop", "permitfilter", "permitsubtop", "onconnect", "onclose", "onpublish", "ondrop", "onnode", "onmqttgap", "log",
}

local function add(list, key, value)
  list[#list + 1] = key
  list[#list + 1] = value
end

local known = {journal = true, origins = true, lastvalue = true, onmsg = true}
for _, key in ipairs(callbacks) do known[key] = true end
for _, key in ipairs(values) do known[key] = true end

local function options(op, label)
  local list = {}
  warn_of_unknown(op, known, "smq.hub")
  for _, key in ipairs(callbacks) do
    local f = arg.optional(arg["function"], op[key], nil, "1." .. key, "create")
    if f then add(list, "f:" .. key, ref(adapters[key](f, key .. label))) end
  end
  for _, key in ipairs(values) do
    if op[key] ~= nil then add(list, key, op[key]) end
  end
  if op.journal then
    local text, fault = ba.json.encode({op.journal})
    if not text then core.raise("bad argument #1.journal to 'create' (" .. tostring(fault) .. ")") end
    add(list, "journal", text)
  end
  for name, given in pairs {origins = op.origins, lastvalue = op.lastvalue} do
    local entries = type(given) == "table" and table.concat(given, ",") or given
    add(list, name, arg.string(entries, "1." .. name, "create"))
  end
  return list
end

local function create(op)
  op = arg.optional(arg.table, op, {}, 1, "create")
  local self = setmetatable({}, class)
  local label = " of the hub made at " .. core.where():gsub(": $", "")
  handles[self] = py.new(core.in_shared_module(), label, table.unpack(options(op, label)))
  if op.onmsg then self:onmsg(op.onmsg) end
  return self
end

-- The integer of a broker, for smq.cluster; nil when `value` is not a broker.
function core.hub_handle(value) return handles[value] end

local function isSMQ(request)
  if getmetatable(request) ~= "request" then core.bad_argument(1, "isSMQ", "request", request) end
  return request:header "SimpleMQ" ~= nil or request:header "Sec-WebSocket-Key" ~= nil
end

return {create = create, isSMQ = isSMQ}
