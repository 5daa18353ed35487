-- Subscriptions: a table for filters without wildcards, and a tree with one node per level for the others.

local topics = require "mqttbroker.topics"

local find, next, sub = string.find, next, string.sub

local Tree = {}
Tree.__index = Tree

local function new_node()
  return {children = {}}
end

local function new()
  return setmetatable({exact = {}, root = new_node(), nodes = 0}, Tree)
end

-- The level of a topic or filter at a position, and the position of the next level; nil after the last one.
local function level_at(topic, at)
  local slash = find(topic, "/", at, true)
  if not slash then return sub(topic, at), nil end
  return sub(topic, at, slash - 1), slash + 1
end

local function put(tree, filter, client, subscription)
  local node, at = tree.root, 1
  while at do
    local level
    level, at = level_at(filter, at)
    if not node.children[level] then
      node.children[level], tree.nodes = new_node(), tree.nodes + 1
    end
    node = node.children[level]
  end
  node.subscribers = node.subscribers or {}
  node.subscribers[client] = subscription
end

-- Remove a client from a set; return the set, or nil when it is empty.
local function drop(subscribers, client)
  if subscribers then subscribers[client] = nil end
  return subscribers and next(subscribers) and subscribers or nil
end

-- Remove a client below `node`; return whether the node is empty.
local function prune(tree, node, filter, at, client)
  if not at then
    node.subscribers = drop(node.subscribers, client)
  else
    local level, after = level_at(filter, at)
    local child = node.children[level]
    if child and prune(tree, child, filter, after, client) then
      node.children[level], tree.nodes = nil, tree.nodes - 1
    end
  end
  return not node.subscribers and not next(node.children)
end

--- Subscribe a client. Its earlier subscription to the same filter is replaced.
function Tree:add(filter, client, subscription)
  if topics.has_wildcard(filter) then return put(self, filter, client, subscription) end
  self.exact[filter] = self.exact[filter] or {}
  self.exact[filter][client] = subscription
end

function Tree:remove(filter, client)
  if topics.has_wildcard(filter) then
    prune(self, self.root, filter, 1, client)
  else
    self.exact[filter] = drop(self.exact[filter], client)
  end
end

-- The levels of a topic, at most one more than a filter may have: no node is deeper.
local function split(topic)
  local levels, count, at = {}, 0, 1
  while at and count <= topics.MAX_LEVELS do
    count = count + 1
    levels[count], at = level_at(topic, at)
  end
  return levels
end

-- "#" also matches the level above it: "a/#" matches "a".
local function walk(node, levels, i, found)
  local children, level = node.children, levels[i]
  local all = children["#"]
  if all then found[#found + 1] = all.subscribers end
  if not level then
    found[#found + 1] = node.subscribers
    return
  end
  found.visited = found.visited + 1
  local named, any = children[level], children["+"]
  if named then walk(named, levels, i + 1, found) end
  if any then walk(any, levels, i + 1, found) end
end

--- The sets of subscribers of a topic, a list of tables client -> subscription. Its field `visited` is the number of visited nodes.
function Tree:match(topic)
  local found = {self.exact[topic], visited = 0}
  if not next(self.root.children) then return found end
  if not topics.is_internal(topic) then
    walk(self.root, split(topic), 1, found)
  else
    local levels = split(topic)
    local child = self.root.children[levels[1]]
    if child then walk(child, levels, 2, found) end
  end
  return found
end

return {new = new}
