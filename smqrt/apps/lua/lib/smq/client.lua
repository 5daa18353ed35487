-- require "smq.client": SMQ clients (spec: smq §3). Python identifies each client by an integer.
--
-- Applications set the callbacks onauth, onconnect, onreconnect, onclose and onmsg as fields of a client. Subscriptions end with the
-- connection: subscribe in onconnect, which is also called after a reconnect when there is no onreconnect.
local core, py = ...

local arg, ref = core.arg, core.ref
local format, ipairs, pairs, setmetatable, tostring, type = string.format, ipairs, pairs, setmetatable, tostring, type

local MAX_REQUEST_MS <const> = 3600000

local methods = {}
local class = core.class("smqclient", methods)
local handles = setmetatable({}, {__mode = "k"}) -- client -> integer
local clients = {}                               -- integer -> client, until it ends without a reconnect

local function handle(self)
  local number = handles[self]
  if not number then core.raise("bad self (a client made by create is expected; call its methods with ':')") end
  return number
end

-- ---- events

local events = {}

function events.auth(self, rnd, ip)
  local credentials = self.onauth and self.onauth(rnd, ip)
  return credentials and tostring(credentials) or ""
end

function events.connect(self, etid, rnd, ip)
  if self.onconnect then self.onconnect(etid, rnd, ip) end
end

function events.reconnect(self, etid, rnd, ip)
  local onreconnect = self.onreconnect or self.onconnect
  if onreconnect then onreconnect(etid, rnd, ip) end
end

function events.close(self, err, canreconnect, text)
  local reconnect = self.onclose and self.onclose(err, canreconnect, text)
  if type(reconnect) == "number" then return reconnect end
  return reconnect and true or false
end

function events.msg(self, data, ptid, tid, subtid)
  if self.onmsg then self.onmsg(data, ptid, tid, subtid) end
end

local connectors = {} -- integer -> {connect = function of the application, op = options, sock = current socket}

-- The application's function must pass a socket to `opened` on which the broker already uses SMQ.
function events.open(self)
  local number = handles[self]
  local connector = connectors[number]
  local function opened(sock, err, details)
    if sock then
      core.socket.self_of(sock, "connect")
      if sock:websocket() then sock, err, details = nil, "incorrectuse", "a socket without WebSocket is needed" end
    end
    if sock then connector.sock = sock end -- prevents its garbage collection
    if not py.opened(number, sock and sock.handle, err and tostring(err), details and tostring(details)) and sock then sock:close() end
  end
  local ok, message = xpcall(connector.connect, core.traceback, self, connector.op, opened)
  if not ok then
    core.log_error("the connect function of an SMQ client failed: " .. message)
    opened(nil, "failed", message)
  end
end

py.on_event(ref(function(number, event, ...)
  if event == "end" then
    clients[number], connectors[number] = nil, nil
    return
  end
  return events[event](clients[number], ...)
end))

-- ---- arguments

local function name(value, index, fname)
  if type(value) == "number" then return arg.integer(value, index, fname) end
  return arg.string(value, index, fname)
end

local function optional_ref(f, index, fname)
  return f ~= nil and ref(arg["function"](f, index, fname)) or nil
end

-- Check that a connected client has the number of a topic, which observe and unsubscribe need. Returns the topic.
local function numbered(number, topic, fname)
  topic = name(topic, 1, fname)
  if type(topic) == "string" and topic ~= "self" and py.gettid(number) and not py.topic2tid(number, topic) then
    core.raise("bad argument #1 to '" .. fname .. "' (unknown topic '" .. topic .. "'; create or subscribe it first)")
  end
  return topic
end

-- ---- methods

-- syntax: smq:create(topic [,onack(accepted, topic, tid)])                           -> whether connected
--         smq:create(topic, subtopic [,onack(accepted, topic, tid, subtopic, stid)])
function methods.create(self, topic, subtopic, onack)
  local number = handle(self)
  topic = name(topic, 1, "create")
  if subtopic == nil or type(subtopic) == "function" then
    return py.number_topic(number, topic, optional_ref(subtopic or onack, 2, "create"))
  end
  subtopic = arg.string(subtopic, 2, "create")
  onack = arg.optional(arg["function"], onack, nil, 3, "create")
  local topic_accepted, tid
  py.number_topic(number, topic, ref(function(accepted, _, id) topic_accepted, tid = accepted, id end))
  return py.number_subtopic(number, subtopic, ref(function(accepted, _, stid)
    if onack then onack(topic_accepted and accepted, topic, tid, subtopic, stid) end
  end))
end

-- syntax: smq:createsub(subtopic [,onack(accepted, subtopic, stid)])                 -> whether connected
function methods.createsub(self, subtopic, onack)
  return py.number_subtopic(handle(self), arg.string(subtopic, 1, "createsub"), optional_ref(onack, 2, "createsub"))
end

-- A callback that calls onmsg with decoded JSON, or with the data unchanged when it is not JSON.
local function decoding(onmsg)
  return function(data, ptid, tid, subtid)
    local value = ba.json.decode(data)
    if value == nil then value = data end
    onmsg(value, ptid, tid, subtid)
  end
end

-- syntax: smq:subscribe(topic [,subtopic] [,{onmsg = f, onack = f, datatype = "json"}])
-- onmsg(data, ptid, tid, subtid), onack(accepted, topic, tid, subtopic, stid)
function methods.subscribe(self, topic, subtopic, settings)
  if type(subtopic) == "table" then subtopic, settings = nil, subtopic end
  settings = arg.optional(arg.table, settings, {}, 3, "subscribe")
  topic, subtopic = name(topic, 1, "subscribe"), arg.optional(name, subtopic, nil, 2, "subscribe")
  local onmsg = arg.optional(arg["function"], settings.onmsg, nil, 3, "subscribe{onmsg}")
  local onack = arg.optional(arg["function"], settings.onack, nil, 3, "subscribe{onack}")
  if onmsg and settings.datatype == "json" then onmsg = decoding(onmsg) end
  return py.subscribe(handle(self), topic, subtopic, onmsg and ref(onmsg), onack and ref(onack))
end

-- syntax: smq:publish(data, topic [,subtopic])                                       -> whether it was queued to be sent
function methods.publish(self, data, topic, subtopic)
  return py.publish(handle(self), core.payload(data, 1, "publish"), name(topic, 2, "publish"), arg.optional(name, subtopic, nil, 3, "publish"))
end

-- syntax: smq:request(etid, data [,timeout ms])                                      -> the answer | nil, error
function methods.request(self, etid, data, timeout)
  local number = handle(self)
  etid, data = arg.integer(etid, 1, "request"), core.payload(data, 2, "request")
  timeout = arg.optional(arg.number, timeout, 10000, 3, "request")
  if not (timeout > 0 and timeout <= MAX_REQUEST_MS) then
    core.raise(format("bad argument #3 to 'request' (%d ms at most, and more than 0)", MAX_REQUEST_MS))
  end
  return py.request(number, etid, data, timeout / 1000)
end

function methods.unsubscribe(self, topic)
  local number = handle(self)
  py.unsubscribe(number, numbered(number, topic, "unsubscribe"))
end

-- syntax: smq:observe(topic, f(subscribers, topic))
function methods.observe(self, topic, f)
  local number = handle(self)
  topic = numbered(number, topic, "observe")
  py.observe(number, topic, ref(arg["function"](f, 2, "observe")))
end

function methods.unobserve(self, topic)
  local number = handle(self)
  py.unobserve(number, numbered(number, topic, "unobserve"))
end

function methods.gettid(self) return py.gettid(handle(self)) end
function methods.topic2tid(self, topic) return py.topic2tid(handle(self), arg.string(topic, 1, "topic2tid")) end
function methods.tid2topic(self, tid) return py.tid2topic(handle(self), arg.integer(tid, 1, "tid2topic")) end
function methods.subtopic2tid(self, topic) return py.subtopic2tid(handle(self), arg.string(topic, 1, "subtopic2tid")) end
function methods.tid2subtopic(self, stid) return py.tid2subtopic(handle(self), arg.integer(stid, 1, "tid2subtopic")) end

-- Disconnect after all published messages were sent. onclose is not called, and the client does not reconnect.
function methods.close(self) py.close(handle(self)) end
methods.disconnect = methods.close

-- ---- the module

local function add(list, key, value)
  list[#list + 1] = key
  list[#list + 1] = value
end

local known = {}
for _, key in ipairs {"uid", "info", "ping", "pong", "timeout", "trusted", "header", "user", "password", "shark", "proxy", "proxyport", "socks",
    "proxyuser", "proxypass", "proxycon", "intf", "ipv6", "host", "persistent", "maxsize"} do
  known[key] = true
end

local function options(op)
  local list = {}
  for _, key in pairs {"uid", "info"} do
    local value = arg.optional(arg.string, op[key], nil, 2, "create{" .. key .. "}")
    if value then add(list, key, value) end
  end
  for _, key in pairs {"ping", "pong", "timeout"} do
    local value = arg.optional(arg.number, op[key], nil, 2, "create{" .. key .. "}")
    if value then add(list, key, key == "timeout" and value / 1000 or value) end
  end
  if op.trusted == false then add(list, "verify", false) end
  for field, value in pairs(arg.optional(arg.table, op.header, {}, 2, "create{header}")) do
    add(list, "header:" .. arg.string(field, 2, "create{header}"), arg.string(value, 2, "create{header}"))
  end
  if op.user then
    local user, password = arg.string(op.user, 2, "create{user}"), arg.string(op.password or "", 2, "create{password}")
    add(list, "header:Authorization", "Basic " .. ba.b64encode(user .. ":" .. password))
  end
  core.http.add_connection_options(list, op)
  return list
end

-- syntax: create(url [,{uid, info, ping = s, pong = s, timeout = ms, header, user, password, shark, trusted = false,
--                       proxy, proxyport, socks, proxyuser, proxypass}])
-- syntax: create(connect, op)
-- connect(smq, op, cb) calls cb(socket [, data that was received already]) or cb(nil, error [, details])
local function create(url, op)
  op = arg.optional(arg.table, op, {}, 2, "create")
  local connect = type(url) == "function" and url or nil
  for key in pairs(op) do
    if not (connect or known[key]) then tracep(false, 0, core.unknown_option("smq.client", key, known)) end -- a function gets all of `op`
  end
  local self = setmetatable({}, class)
  local number = py.create(not connect and arg.string(url, 1, "create") or nil, table.unpack(options(op)))
  handles[self], clients[number] = number, self
  if connect then connectors[number] = {connect = connect, op = op} end
  return self
end

return {create = create}
