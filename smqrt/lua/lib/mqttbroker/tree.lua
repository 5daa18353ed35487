-- Who subscribed to what: filters without wildcards in a table, the others in a tree with a node per level.

local topics = require "mqttbroker.topics"

local find, next, sub = string.find, next, string.sub

local Tree = {}
Tree.__index = Tree

local function new_node()
  return {children = {}}
end

local function new()
  return setmetatable({exact = {}, root = new_node()}, Tree)
end

--- The level of a topic or filter at a position, and the position of the level after it, nil behind the last one.
local function level_at(topic, at)
  local slash = find(topic, "/", at, true)
  if not slash then return sub(topic, at), nil end
  return sub(topic, at, slash - 1), slash + 1
end

local function put(node, filter, at, client, subscription)
  while at do
    local level
    level, at = level_at(filter, at)
    node.children[level] = node.children[level] or new_node()
    node = node.children[level]
  end
  node.subscribers = node.subscribers or {}
  node.subscribers[client] = subscription
end

local function drop(subscribers, client)
  if subscribers then subscribers[client] = nil end
  return subscribers and next(subscribers) and subscribers or nil
end

--- Removes a client below `node`; answers whether the node is of no more use.
local function prune(node, filter, at, client)
  if not at then
    node.subscribers = drop(node.subscribers, client)
  else
    local level, after = level_at(filter, at)
    local child = node.children[level]
    if child and prune(child, filter, after, client) then node.children[level] = nil end
  end
  return not node.subscribers and not next(node.children)
end

--- Subscribes a client. Its earlier subscription to the same filter is replaced.
function Tree:add(filter, client, subscription)
  if topics.has_wildcard(filter) then return put(self.root, filter, 1, client, subscription) end
  self.exact[filter] = self.exact[filter] or {}
  self.exact[filter][client] = subscription
end

function Tree:remove(filter, client)
  if topics.has_wildcard(filter) then
    prune(self.root, filter, 1, client)
  else
    self.exact[filter] = drop(self.exact[filter], client)
  end
end

local function collect(node, found)
  if node and node.subscribers then found[#found + 1] = node.subscribers end
end

local walk

local function descend(node, topic, at, found)
  if node then walk(node, topic, at, found) end
end

-- "#" is also for the level above it: "a/#" is for "a".
walk = function(node, topic, at, found)
  local children = node.children
  collect(children["#"], found)
  if not at then return collect(node, found) end
  local level, after = level_at(topic, at)
  descend(children[level], topic, after, found)
  descend(children["+"], topic, after, found)
end

--- The sets of subscribers of a topic, as a list of tables client -> subscription.
function Tree:match(topic)
  local found = {self.exact[topic]}
  if not next(self.root.children) then return found end
  if not topics.is_internal(topic) then
    walk(self.root, topic, 1, found)
  else
    local level, after = level_at(topic, 1)
    descend(self.root.children[level], topic, after, found)
  end
  return found
end

return {new = new}
