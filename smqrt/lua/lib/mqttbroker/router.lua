-- The clients of a broker and the way of a message from one to the others. Knows no sockets: a client is anything with `id`,
-- `filters` (a table), `deliver(message, subscription)`, `flush()` and `stop(code, text)`.

local fields = require "mqttbroker.fields"
local refusal = require "mqttbroker.refusal"
local topics = require "mqttbroker.topics"
local tree = require "mqttbroker.tree"

local char, pairs = string.char, pairs

local MAX_SUBSCRIPTIONS <const> = 1000 -- of a client
local PART_BITS <const> = 8 -- 256 bytes cost about as much as a message
local SUBSCRIPTION_IDENTIFIER <const> = char(0x0B)

local Router = {}
Router.__index = Router

local function new(allow_wildcards)
  return setmetatable({allow_wildcards = allow_wildcards, clients = {}, count = 0, tree = tree.new(), waiting = {}}, Router)
end

--- Takes a client in. One with the same identifier is thrown out (MQTT 5 §3.1.4).
function Router:enter(client)
  local old = self.clients[client.id]
  if old then old:stop(refusal.TAKEN_OVER, "another client with the same identifier has connected") end
  self.clients[client.id], self.count = client, self.count + 1
end

--- Forgets a client and its subscriptions.
function Router:leave(client)
  if self.clients[client.id] ~= client then return end
  self.clients[client.id], self.count = nil, self.count - 1
  for filter in pairs(client.filters) do self.tree:remove(filter, client) end
end

local function reason_against(self, client, filter)
  if topics.is_shared(filter) then return refusal.SHARED end
  if not topics.is_filter(filter) then return refusal.TOPIC_FILTER end
  if not self.allow_wildcards and topics.has_wildcard(filter) then return refusal.WILDCARD end
  if not client.filters[filter] and client.filter_count >= MAX_SUBSCRIPTIONS then return refusal.QUOTA end
end

--- Subscribes a client. wanted: {filter, id, nolocal, retainaspublished, onpub}. Returns the reason code: 0, the granted QoS, or why not.
function Router:subscribe(client, wanted)
  local filter = wanted.filter
  local code = reason_against(self, client, filter)
  if code then return code end
  wanted.identifiers = wanted.id and SUBSCRIPTION_IDENTIFIER .. fields.pack_varint(wanted.id) or ""
  if not client.filters[filter] then client.filter_count = client.filter_count + 1 end
  client.filters[filter] = wanted
  self.tree:add(filter, client, wanted)
  return refusal.NORMAL
end

function Router:unsubscribe(client, filter)
  if not client.filters[filter] then return refusal.NO_SUBSCRIPTION end
  client.filters[filter], client.filter_count = nil, client.filter_count - 1
  self.tree:remove(filter, client)
  return refusal.NORMAL
end

-- What two subscriptions of a client make together: it gets a message once.
local function join(one, other)
  local parts = {table.unpack(one.parts or {one})}
  parts[#parts + 1] = other
  return {
    identifiers = one.identifiers .. other.identifiers,
    retainaspublished = one.retainaspublished or other.retainaspublished,
    parts = parts,
  }
end

local function united(sets, from)
  local union = {}
  for _, subscribers in ipairs(sets) do
    for client, subscription in pairs(subscribers) do
      if not (subscription.nolocal and client == from) then
        union[client] = union[client] and join(union[client], subscription) or subscription
      end
    end
  end
  return union
end

local function receivers(self, message, from)
  local sets = self.tree:match(message.topic)
  if #sets == 1 then return sets[1] end
  return united(sets, from)
end

--- Gives a message to its subscribers; it leaves with the next `flush`. from: the client that published it, for "no local".
-- Returns how much work it was: the number of deliveries, a large one counting for several.
function Router:publish(message, from)
  local waiting, count = self.waiting, 0
  for client, subscription in pairs(receivers(self, message, from)) do
    if not (subscription.nolocal and client == from) then
      client:deliver(message, subscription)
      waiting[client], count = true, count + 1
    end
  end
  return count * (1 + (#message.payload >> PART_BITS))
end

--- Sends what was published: several messages for a client that were read together are written together.
function Router:flush()
  local waiting = self.waiting
  if not next(waiting) then return end
  self.waiting = {} -- a client that is sent to may publish
  for client in pairs(waiting) do client:flush() end
end

return {new = new}
