-- Authentication and permissions by the server's users and rules: `auth = true` (help: identity). Each client has a number in Python.
local core, py = ...

local refusal = require "mqttbroker.refusal"

local cpu_clock, next, pairs = os.clock, next, pairs

local MAX_CACHED_TOPICS <const> = 1000 -- permissions of a client
local TIME_SLICE_S <const> = 0.004     -- of CPU time, for each call of `recheck`

local identity = {}

--- Authenticate the client of a CONNECT, or raise a refusal. May block.
function identity.login(self, request)
  local number, busy, text = py.login(self.id, request.username, request.password, self.client.address or "")
  if not number then refusal.raise(busy and refusal.UNAVAILABLE or refusal.CREDENTIALS, text) end
  self.identity, self.publishes, self.publish_count = number, {}, 0
  self.client.user = py.user(number)
end

--- Raise a refusal when the identifier is in use by another user's client.
function identity.check_takeover(self, old)
  if self.identity and old and old.identity and not py.same(self.identity, old.identity) then
    identity.leave(self)
    refusal.raise(refusal.NOT_AUTHORIZED, "another user's client has this identifier")
  end
end

--- The error when the server has no users to authenticate; else nil.
function identity.fault_of_server()
  local fault = py.fault_of_server()
  return fault and "bad argument #2 to 'create' (" .. fault .. ")"
end

--- Release the number of a disconnected client.
function identity.leave(self)
  local number = self.identity
  self.identity = nil
  if number then py.leave(number) end
end

--- Whether a client may publish to a topic. Results are cached.
function identity.may_publish(self, topic)
  local allowed = self.publishes[topic]
  if allowed == nil then
    if self.publish_count >= MAX_CACHED_TOPICS then self.publishes, self.publish_count = {}, 0 end
    allowed = py.may_publish(self.identity, topic)
    self.publishes[topic], self.publish_count = allowed, self.publish_count + 1
  end
  return allowed
end

--- Whether a client may subscribe to all topics that a filter matches.
function identity.may_subscribe(self, filter) return py.may_subscribe(self.identity, filter) end

local function recheck_session(session)
  local fault = py.fault(session.identity)
  if fault then return session:stop(refusal.NOT_AUTHORIZED, fault) end
  session.publishes, session.publish_count = {}, 0
  local denied = {}
  for filter in pairs(session.filters) do
    if not identity.may_subscribe(session, filter) then denied[#denied + 1] = filter end
  end
  for _, filter in ipairs(denied) do session.router:unsubscribe(session, filter) end
end

--- Recheck all clients after a change of users or rules: as many as fit in a time slice per call. Called by the timer of the broker.
function identity.recheck(broker)
  local generation = py.generation()
  if generation ~= broker.generation then
    broker.generation, broker.unchecked = generation, {}
    for session in pairs(broker.sessions) do broker.unchecked[session] = true end
  end
  local unchecked, until_s = broker.unchecked, cpu_clock() + TIME_SLICE_S
  while unchecked and next(unchecked) and cpu_clock() < until_s do
    local session = next(unchecked)
    unchecked[session] = nil
    if session.identity and not session.left then recheck_session(session) end
  end
end

return identity
