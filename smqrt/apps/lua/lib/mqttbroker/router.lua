-- The clients of a broker and the way of a message from one to the others. Knows no sockets: a client is anything with `id`,
-- `filters` (a table), `deliver(message, subscription)`, `flush()` and `stop(code, text)`.

local fields = require "mqttbroker.fields"
local refusal = require "mqttbroker.refusal"
local topics = require "mqttbroker.topics"
local tree = require "mqttbroker.tree"

local char, concat, pairs = string.char, table.concat, pairs

-- Limits of a client; one that reaches them gets "quota exceeded" for the subscription.
local MAX_SUBSCRIPTIONS <const> = 1000
local MAX_FILTER_BYTES <const> = 262144 -- of all its filters
local MAX_LEVELS <const> = 5000 -- of all its filters with wildcards
-- And of all clients together: a message may have to look at every node, which takes 0.2 us each.
local MAX_NODES <const> = 100000
local VISITS_BITS <const> = 3 -- eight nodes cost about as much as a message
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

--- What the router keeps of a client: its filters, and how much they are.
function Router.account()
  return {filters = {}, filter_count = 0, filter_bytes = 0, levels = 0}
end

local function levels_of(filter)
  return topics.has_wildcard(filter) and topics.levels(filter) or 0
end

-- Adds (sign 1) or takes back (-1) what a filter is.
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
  if not client.filters[filter] and exceeds(self, client, filter) then return refusal.QUOTA end
end

--- Subscribes a client. wanted: {filter, id, nolocal, retainaspublished, onpub}. Returns the reason code: 0, the granted QoS, or why not.
function Router:subscribe(client, wanted)
  local filter = wanted.filter
  local code = reason_against(self, client, filter)
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

-- Several subscriptions of one client to a message: it gets it once, with all identifiers.
local function united(parts)
  if #parts == 1 then return parts[1] end
  local identifiers, as_published = {}, false
  for i, part in ipairs(parts) do
    identifiers[i], as_published = part.identifiers, as_published or part.retainaspublished
  end
  return {identifiers = concat(identifiers), retainaspublished = as_published, parts = parts}
end

-- Client -> its subscriptions to a message, and how many those are in all.
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

local function give(self, client, message, subscription)
  client:deliver(message, subscription)
  self.waiting[client] = true
end

-- For a topic with one set of subscribers, which is the usual case. Returns how many they are.
local function give_to_set(self, message, subscribers, from)
  local count = 0
  for client, subscription in pairs(subscribers) do
    if not (subscription.nolocal and client == from) then
      give(self, client, message, subscription)
      count = count + 1
    end
  end
  return count
end

local function give_to_sets(self, message, sets, from)
  local lists, count = gather(sets, from)
  for client, list in pairs(lists) do give(self, client, message, united(list)) end
  return count
end

--- Gives a message to its subscribers; it leaves with the next `flush`. from: the client that published it, for "no local".
-- Returns how much work it was: the number of subscriptions, a large message counting for several, and the search for them.
function Router:publish(message, from)
  local sets = self.tree:match(message.topic)
  local count
  if #sets == 1 then
    count = give_to_set(self, message, sets[1], from)
  else
    count = give_to_sets(self, message, sets, from)
  end
  return count * (1 + (#message.payload >> PART_BITS)) + (sets.visited >> VISITS_BITS)
end

--- Sends what was published: several messages for a client that were read together are written together.
function Router:flush()
  local waiting = self.waiting
  if not next(waiting) then return end
  self.waiting = {} -- a client that is sent to may publish
  for client in pairs(waiting) do client:flush() end
end

return {new = new}
