-- require "smq.cluster": a hub that forms a cluster with the hubs of the same name on other nodes (spec: smq §6).
local core, py = ...
require "smq.hub"
local mtls = require "smq.mtl"

local arg = core.arg
local type = type

local cluster = {}
local class = core.class("cluster", cluster)
local handles = setmetatable({}, {__mode = "k"})
local links_of = setmetatable({}, {__mode = "k"}) -- cluster -> its links

local function handle(self)
  local number = handles[self]
  if not number then core.raise("bad self (a cluster made by create is expected; call its methods with ':')") end
  return number
end

-- The integer of a cluster's links; nil when `value` is not a cluster.
function core.mtl_of_cluster(value)
  if handles[value] and not links_of[value] then
    core.raise("bad argument #1 to 'create' (this cluster uses the server's links, which the settings define; pass an mtl to smq.cluster)")
  end
  return links_of[value] and core.mtl_handle(links_of[value])
end

local function name(value, index, fname)
  if type(value) == "number" then return arg.integer(value, index, fname) end
  return arg.string(value, index, fname)
end

-- syntax: cluster:publish(data [,ptid], subtopic)     -> number of other nodes, whose servers get the message
function cluster.publish(self, data, ptid, subtopic)
  if subtopic == nil then ptid, subtopic = nil, ptid end
  return py.publish(handle(self), core.payload(data, 1, "publish"),
    arg.optional(name, subtopic, nil, "subtopic", "publish"), arg.optional(arg.integer, ptid, nil, 2, "publish"))
end

-- syntax: cluster:pubon(data, ptid, topic [,subtopic])     -> whether the client `ptid` is connected to a node
function cluster.pubon(self, data, ptid, topic, subtopic)
  return py.pubon(handle(self), core.payload(data, 1, "pubon"), arg.integer(ptid, 2, "pubon"),
    name(topic, 3, "pubon"), arg.optional(name, subtopic, nil, 4, "pubon"))
end

-- syntax: cluster:nodes()     -> {number of a node = number of its clients}
function cluster.nodes(self)
  return core.table_of_pairs(py.nodes(handle(self)))
end

-- syntax: cluster:node()      -> this node's number
function cluster.node(self) return py.node(handle(self)) end

-- syntax: cluster:shutdown([msg])     closes the clients of all nodes
function cluster.shutdown(self, msg) py.shutdown(handle(self), arg.optional(arg.string, msg, nil, 1, "shutdown")) end

-- syntax: cluster:close([msg])        leaves the cluster; the hub and its clients continue
function cluster.close(self, msg) py.close(handle(self), arg.optional(arg.string, msg, "", 1, "close")) end

-- syntax: create(smq, mtl [,{name}]), or create(smq [,password [,{name}]])
local function create(smq, links, op)
  local hub = core.hub_handle(smq) -- an integer
  if not hub then core.bad_argument(1, "create", "smq", smq) end
  if type(links) == "string" or type(links) == "number" then links = mtls.create(links) end
  if links ~= nil and not core.mtl_handle(links) then core.bad_argument(2, "create", "mtl or password", links) end
  op = arg.optional(arg.table, op, {}, 3, "create")
  local self = setmetatable({}, class)
  local label = arg.optional(arg.string, op.name, "", "3.name", "create")
  handles[self] = py.cluster(hub, links and core.mtl_handle(links), label)
  links_of[self] = links
  return self
end

return {create = create}
