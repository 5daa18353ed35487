-- require "smq.conn": links between nodes: accepted on a port, and opened to a list of nodes (spec: smq §6).
local core, py = ...
require "smq.mtl"

local arg, ref = core.arg, core.ref

local conn = {}
local class = core.class("conn", conn)
local handles = setmetatable({}, {__mode = "k"})

local function handle(self)
  local number = handles[self]
  if not number then core.raise("bad self (an object made by create is expected; call its methods with ':')") end
  return number
end

-- syntax: conn:setlist{"10.0.0.2", "10.0.0.3"}, or conn:setlist{["10.0.0.2"] = 1901}      -> true
function conn.setlist(self, list)
  local flat = {}
  for key, value in pairs(arg.table(list, 1, "setlist")) do
    local name, port = value, 0
    if type(key) ~= "number" then name, port = key, arg.integer(value, "1." .. tostring(key), "setlist") end
    flat[#flat + 1] = arg.string(name, "1." .. tostring(key), "setlist")
    flat[#flat + 1] = port
  end
  return py.setlist(handle(self), table.unpack(flat))
end

-- syntax: conn:add(name [,port])      -> true
function conn.add(self, name, port)
  return py.add(handle(self), arg.string(name, 1, "add"), arg.optional(arg.integer, port, 0, 2, "add"))
end

-- syntax: conn:status()       -> {ip = whether there is a link}
function conn.status(self)
  return core.table_of_pairs(py.status(handle(self)))
end

-- syntax: conn:shutdown()     accepts and opens no further links; existing ones stay open
function conn.shutdown(self) py.conn_shutdown(handle(self)) end

local known = {intf = true, ipv6 = true, shark = true, sshark = true, onstatus = true}

-- syntax: create(mtl, port [,{intf, ipv6, shark, sshark, onstatus = function(ip, up, err)}])      -> conn | nil, err
local function create(mtl, port, op)
  local links = core.mtl_handle(mtl) or (core.mtl_of_cluster and core.mtl_of_cluster(mtl))
  if not links then core.bad_argument(1, "create", "mtl or cluster", mtl) end
  op = arg.optional(arg.table, op, {}, 3, "create")
  for key in pairs(op) do
    if not known[key] then tracep(false, 0, core.unknown_option("smq.conn", key, known)) end
  end
  local host = arg.optional(arg.string, op.intf, op.ipv6 and "::" or "0.0.0.0", "3.intf", "create")
  local shark = op.shark and core.tls.check(op.shark, "3.shark", "create", "client")
  local sshark = op.sshark and core.tls.check(op.sshark, "3.sshark", "create", "server")
  local onstatus = arg.optional(arg["function"], op.onstatus, nil, "3.onstatus", "create")
  local number, found = py.conn(links, arg.optional(arg.integer, port, nil, 2, "create"), host, shark, sshark, onstatus and ref(onstatus))
  if not number then return nil, found end
  local self = setmetatable({port = found}, class)
  handles[self] = number
  return self
end

return {create = create}
