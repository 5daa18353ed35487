-- Router: the clients of a broker, their subscriptions, and delivery of messages. It does not use sockets: a client is any object
-- with the fields of `account`, `id`, `deliver(message, subscription)`, `flush()` and `stop(code, text)`.

local fields = require "mqttbroker.fields"
local refusal = require "mqttbroker.refusal"
local topics = require "mqttbroker.topics"
local tree = require "mqttbroker.tree"

local char, concat, pairs = string.char, table.concat, pairs

-- Limits; a subscription that exceeds one gets "quota exceeded". The first three are per client.
local MAX_SUBSCRIPTIONS <const> = 1000
local MAX_FILTER_BYTES <const> = 262144 -- sum of all filters
local MAX_LEVELS <const> = 5000         -- sum of all filters with wildcards
local MAX_NODES <const> = 100000        -- of the broker: a message may visit every node, 0.2 us each
local VISITS_BITS <const> = 3           -- a visit of eight nodes costs about as much as a delivery
local PAYLOAD_BITS <const> = 8          -- 256 bytes cost about as much as a delivery
local SUBSCRIPTION_IDENTIFIER <const> = char(0x0B)

local Router = {}
Router.__index = Router

local function new(allow_wildcards)
  return setmetatable({allow_wildcards = allow_wildcards, clients = {}, count = 0, tree = tree.new(), unflushed = {}}, Router)
end

--- Register a client. An earlier client with the same identifier is disconnected (MQTT 5 §3.1.4).
function Router:enter(client)
  local old = self.clients[client.id]
  if old then old:stop(refusal.TAKEN_OVER, "another client with the same identifier has connected") end
  self.clients[client.id], self.count = client, self.count + 1
end

--- The fields of a client without subscriptions that the router maintains.
function Router.account()
  return {filters = {}, filter_count = 0, filter_bytes = 0, levels = 0}
end

local function levels_of(filter)
  return topics.has_wildcard(filter) and topics.levels(filter) or 0
end

-- Add (sign 1) or subtract (sign -1) a filter in the sums of a client.
local function charge(client, filter, sign)
  client.filter_count = client.filter_count + sign
  client.filter_bytes = client.filter_bytes + sign * #filter
  client.levels = client.levels + sign * levels_of(filter)
end

local function exceeds(self, client, filter)
  local levels = levels_of(filter)
  return client.filter_count >= MAX_SUBSCRIPTIONS or client.filter_bytes + #filter > MAX_FILTER_BYTES
    or client.levels + levels > MAX_LEVELS or self.tree.nodes + levels > MAX_NODES
end

--- Remove a client and its subscriptions.
function Router:leave(client)
  if self.clients[client.id] ~= client then return end
  self.clients[client.id], self.count = nil, self.count - 1
  for filter in pairs(client.filters) do self.tree:remove(filter, client) end
end

-- The reason code that rejects a filter; nil when it is accepted.
local function rejection_of(self, client, filter)
  if topics.is_shared(filter) then return refusal.SHARED end
  if not topics.is_filter(filter) then return refusal.TOPIC_FILTER end
  if not self.allow_wildcards and topics.has_wildcard(filter) then return refusal.WILDCARD end
  if not client.filters[filter] and exceeds(self, client, filter) then return refusal.QUOTA end
end

--- Subscribe a client. wanted: {filter, id, nolocal, retainaspublished, onpub}. Returns the reason code: 0 (the granted QoS), or an error.
function Router:subscribe(client, wanted)
  local filter = wanted.filter
  local code = rejection_of(self, client, filter)
  if code then return code end
  wanted.identifiers = wanted.id and SUBSCRIPTION_IDENTIFIER .. fields.pack_varint(wanted.id) or ""
  if not client.filters[filter] then charge(client, filter, 1) end
  client.filters[filter] = wanted
  self.tree:add(filter, client, wanted)
  return refusal.NORMAL
end

function Router:unsubscribe(client, filter)
  if not client.filters[filter] then return refusal.NO_SUBSCRIPTION end
  client.filters[filter] = nil
  charge(client, filter, -1)
  self.tree:remove(filter, client)
  return refusal.NORMAL
end

-- One subscription that combines those of a client, so that it gets a message once, with all subscription identifiers.
local function combined(parts)
  if #parts == 1 then return parts[1] end
  local identifiers, as_published = {}, false
  for i, part in ipairs(parts) do
    identifiers[i], as_published = part.identifiers, as_published or part.retainaspublished
  end
  return {identifiers = concat(identifiers), retainaspublished = as_published, parts = parts}
end

-- A table client -> list of its subscriptions, and the number of subscriptions.
local function gather(sets, from)
  local lists, count = {}, 0
  for _, subscribers in ipairs(sets) do
    for client, subscription in pairs(subscribers) do
      if not (subscription.nolocal and client == from) then
        local list = lists[client] or {}
        list[#list + 1] = subscription
        lists[client], count = list, count + 1
      end
    end
  end
  return lists, count
end

local function deliver(self, client, message, subscription)
  client:deliver(message, subscription)
  self.unflushed[client] = true
end

-- Deliver to one set of subscribers, which is the usual case. Returns the number of deliveries.
local function deliver_to_set(self, message, subscribers, from)
  local count = 0
  for client, subscription in pairs(subscribers) do
    if not (subscription.nolocal and client == from) then
      deliver(self, client, message, subscription)
      count = count + 1
    end
  end
  return count
end

local function deliver_to_sets(self, message, sets, from)
  local lists, count = gather(sets, from)
  for client, list in pairs(lists) do deliver(self, client, message, combined(list)) end
  return count
end

--- Deliver a message to its subscribers; they send it with the next `flush`. from: the client that published it, for "no local".
-- Returns the amount of work, where 1 is the delivery of a small message.
function Router:publish(message, from)
  local sets = self.tree:match(message.topic)
  local count
  if #sets == 1 then
    count = deliver_to_set(self, message, sets[1], from)
  else
    count = deliver_to_sets(self, message, sets, from)
  end
  return count * (1 + (#message.payload >> PAYLOAD_BITS)) + (sets.visited >> VISITS_BITS)
end

--- Send delivered messages, so that messages of one batch are written to a client together.
function Router:flush()
  local unflushed = self.unflushed
  if not next(unflushed) then return end
  self.unflushed = {} -- `client:flush` may run a callback that publishes
  for client in pairs(unflushed) do client:flush() end
end

return {new = new}
