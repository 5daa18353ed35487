-- The commands of the client cases, for Lua's smq.client.
local create = require "smq.client".create
local clients, paused, prefixes = {}, {}, {}

local commands = {}

-- A client restores nothing by itself: subscriptions are made again in onconnect, as applications do.
function commands.connect(name, command)
  local options = {uid = command.uid, info = command.info, timeout = 10000}
  local smq = create(command.url, options)
  local reconnects = not (command.options and command.options.reconnect == false)
  local connected = false
  clients[name] = smq
  if command.password then smq.onauth = function() return command.password end end
  function smq.onconnect(etid) driver.event(name, connected and "reconnected" or "connected", "etid", etid); connected = true end
  function smq.onclose(err, canreconnect, text)
    driver.event(name, "disconnected", "reason", text or err)
    if canreconnect and reconnects then return 50 end
    driver.event(name, "closed", "reason", text or err)
    return false
  end
  function smq.onmsg(data, ptid, tid, subtid)
    while paused[name] do ba.sleep(5) end
    local own = tid == smq:gettid()
    if own and subtid ~= 0 and prefixes[name] then smq:publish(prefixes[name] .. data, ptid, subtid) return end
    driver.event(name, "message", "topic", own and "self" or smq:tid2topic(tid),
      "subtopic", subtid ~= 0 and smq:tid2subtopic(subtid) or nil, "from", ptid, "data", data)
  end
end

function commands.subscribe(name, command)
  local smq = clients[name]
  smq:subscribe(command.topic, command.subtopic, {onmsg = smq.onmsg, onack = function(accepted, topic)
    driver.event(name, "subscribed", "topic", topic, "accepted", accepted)
  end})
end

function commands.unsubscribe(name, command) clients[name]:unsubscribe(command.topic) end

function commands.create(name, command)
  clients[name]:create(command.topic, function(_, topic, tid) driver.event(name, "created", "topic", topic, "tid", tid) end)
end

function commands.createsub(name, command)
  clients[name]:createsub(command.subtopic, function(_, subtopic, stid)
    driver.event(name, "created", "subtopic", subtopic, "stid", stid)
  end)
end

function commands.publish(name, command, data)
  if not clients[name]:publish(data, command.etid or command.topic, command.subtopic) then error("not sent", 0) end
end

function commands.request(name, command, data)
  return assert(clients[name]:request(command.etid, data, command.timeout_ms))
end

function commands.observe(name, command)
  clients[name]:observe(command.etid or command.topic, function(subscribers, topic)
    driver.event(name, "change", command.etid and "etid" or "topic", topic, "subscribers", subscribers)
  end)
end

function commands.unobserve(name, command) clients[name]:unobserve(command.etid or command.topic) end
function commands.answer(name, command) prefixes[name] = command.prefix end
function commands.pause(name) paused[name] = true end
function commands.resume(name) paused[name] = nil end

function commands.disconnect(name)
  clients[name]:close()
  driver.event(name, "closed", "reason", nil)
end

function commands.close(name) paused[name] = nil; clients[name]:close() end

function run(json, data)
  local command = ba.json.decode(json)
  local execute = commands[command["do"]] or error("not supported", 0)
  return execute(command.client, command, data)
end
