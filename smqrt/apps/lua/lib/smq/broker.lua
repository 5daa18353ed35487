-- require "smq.broker": the deprecated form of smq.hub, whose methods are called with a dot (spec: smq §2.5).
local hub = require "smq.hub"

local methods = {
  "close", "connect", "create", "createsub", "drops", "etid2peer", "gettid", "observe", "onmsg", "peers", "pubon", "publish", "queuesize",
  "setkeepalive", "shutdown", "sock2peer", "subscribe", "subtopic2tid", "subtopics", "tid2subtopic", "tid2topic", "topic2tid",
  "topics", "unobserve", "unsubscribe",
}

local function create(op)
  tracep(false, 5, 'require "smq.broker" is deprecated: use require "smq.hub" and call methods with a colon')
  local settings = {rndtid = true}
  for key, value in pairs(op or {}) do settings[key] = value end
  local smq = hub.create(settings)
  local broker = {getbroker = function() return smq end}
  for _, name in ipairs(methods) do
    broker[name] = function(...) return smq[name](smq, ...) end
  end
  return broker
end

return {create = create, isSMQ = hub.isSMQ}
