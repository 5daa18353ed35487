-- Clients of the network by the server's own users and rules: `auth = true` (help: identity). Each has a number in Python.
local core, py = ...

local refusal = require "mqttbroker.refusal"

local cpu_clock, next, pairs = os.clock, next, pairs

local MAX_REMEMBERED <const> = 1000 -- checked topics of a client
local PORTION_S <const> = 0.004     -- of the CPU, for looking at clients again, four times a second

local identity = {}

--- Lets the client of a CONNECT in, or raises the refusal. May wait.
function identity.login(self, request)
  local number, busy, text = py.login(self.id, request.username, request.password, self.client.address or "")
  if not number then refusal.raise(busy and refusal.UNAVAILABLE or refusal.CREDENTIALS, text) end
  self.identity, self.publishes, self.publish_count = number, {}, 0
  self.client.user = py.user(number)
end

--- A connection with the identifier of another user's client does not replace that client.
function identity.check_taking_over(self, old)
  if self.identity and old and old.identity and not py.same(self.identity, old.identity) then
    identity.leave(self)
    refusal.raise(refusal.NOT_AUTHORIZED, "another user's client has this identifier")
  end
end

--- Why the server can't authenticate clients; nil when it can.
function identity.fault_of_server()
  local fault = py.fault_of_server()
  return fault and "bad argument #2 to 'create' (" .. fault .. ")"
end

--- The connection is gone.
function identity.leave(self)
  local number = self.identity
  self.identity = nil
  if number then py.leave(number) end
end

--- Whether it may publish to a topic; checked once for each topic.
function identity.may_publish(self, topic)
  local may = self.publishes[topic]
  if may == nil then
    if self.publish_count >= MAX_REMEMBERED then self.publishes, self.publish_count = {}, 0 end
    may = py.may_publish(self.identity, topic)
    self.publishes[topic], self.publish_count = may, self.publish_count + 1
  end
  return may
end

--- Whether it may have all topics that a filter matches.
function identity.may_subscribe(self, filter) return py.may_subscribe(self.identity, filter) end

local function look_at(session)
  local fault = py.fault(session.identity)
  if fault then return session:stop(refusal.NOT_AUTHORIZED, fault) end
  session.publishes, session.publish_count = {}, 0
  local gone = {}
  for filter in pairs(session.filters) do
    if not identity.may_subscribe(session, filter) then gone[#gone + 1] = filter end
  end
  for _, filter in ipairs(gone) do session.router:unsubscribe(session, filter) end
end

--- Looks at all clients again after users or rules have changed, a portion each time it is called.
function identity.look_again(broker)
  local generation = py.generation()
  if generation ~= broker.generation then
    broker.generation, broker.to_look_at = generation, {}
    for session in pairs(broker.sessions) do broker.to_look_at[session] = true end
  end
  local waiting, until_s = broker.to_look_at, cpu_clock() + PORTION_S
  while waiting and next(waiting) and cpu_clock() < until_s do
    local session = next(waiting)
    waiting[session] = nil
    if session.identity and not session.left then look_at(session) end
  end
end

return identity
