-- require "httpc": HTTP clients (spec: bas-api §9). Python identifies each client by an integer. Calls block only the caller.
local core, py = ...

local arg, concat, ipairs, pack, pairs = core.arg, table.concat, ipairs, string.pack, pairs
local rawtype, select, setmetatable, tostring = core.rawtype, select, setmetatable, tostring

local methods = {}
local class = core.class("httpc", methods)

local classes = {[class] = true} -- the classes of clients

function class.__gc(self) py.drop(self.handle) end

local http = {}
core.http = http

--- Return a class of clients that has the methods of httpc and those in the table `more`.
function http.subclass(name, more)
  local sub = core.class(name, setmetatable(more, {__index = methods}))
  sub.__gc, sub.__close = class.__gc, class.__close
  classes[sub] = true
  return sub
end

--- The integer of a client of httpc, http or httpm. Raises an error when `value` is not a client.
function http.check(value, index, fname)
  if not classes[core.getmetatable(value)] then core.bad_argument(index, fname, "HTTP client", value) end
  return value.handle
end

local function handle_of(self, fname)
  return http.check(self, 0, fname)
end

-- ---- arguments

local function text(value, index, fname)
  local meta = core.getmetatable(value)
  if rawtype(value) == "table" and meta and meta.__tostring then return tostring(value) end
  if rawtype(value) == "boolean" then return tostring(value) end
  return arg.string(value, index, fname)
end

-- Names and values as one string for Python. values: {name = value or array of values}, or an array of {name, value}.
local function packed(values, fname)
  local list = {}
  local function add(name, value)
    list[#list + 1] = pack("s4s4", text(name, 1, fname), text(value, 1, fname))
  end
  for name, value in pairs(arg.optional(arg.table, values, {}, 1, fname)) do
    if rawtype(name) == "number" then
      add(arg.table(value, 1, fname)[1], value[2])
    elseif rawtype(value) == "table" and not (core.getmetatable(value) or {}).__tostring then
      for _, one in ipairs(value) do add(name, one) end
    else
      add(name, value)
    end
  end
  return concat(list)
end

--- Fields of a form, URL-encoded.
function http.form(fields)
  return py.form(packed(fields, "post"))
end

local PROXY <const> = {proxy = "string", proxyport = "integer", socks = "boolean", proxyuser = "string", proxypass = "string"}
local OPTIONS <const> = {
  persistent = "boolean", proxycon = "boolean", intf = "string", ipv6 = "boolean", host = "string",
  maxsize = "positive",
}

local function add_options(list, op, kinds)
  for name, kind in pairs(kinds) do
    local value = arg.optional(arg[kind], op[name], nil, 1, "create{" .. name .. "}")
    if value ~= nil then list[#list + 1] = name list[#list + 1] = value end
  end
end

--- Append the TLS client and the proxy options of `op` to `list`, as alternating names and values.
function http.add_connection_options(list, op)
  add_options(list, op, PROXY)
  if op.shark ~= nil then
    list[#list + 1] = "shark"
    list[#list + 1] = core.tls.check(op.shark, 1, "create{shark}", "client")
  end
end

local function options(op)
  local list = {}
  add_options(list, op, OPTIONS)
  http.add_connection_options(list, op)
  return table.unpack(list)
end

--- Return a new client. follow: it follows redirects, stores cookies, and uses `op` as defaults of requests. kind: its class.
function http.create(op, follow, kind)
  op = arg.optional(arg.table, op, {}, 1, "create")
  return setmetatable({handle = py.create(follow, options(op)), defaults = follow and op or {}}, kind or class)
end

-- ---- requests

local function optional(op, name, kind)
  return arg.optional(arg[kind], op[name], nil, 1, "request{" .. name .. "}")
end

local function merged(op, defaults)
  return setmetatable({}, {__index = function(_, name)
    local value = op[name]
    if value == nil then return defaults[name] end
    return value
  end})
end

-- syntax: http:request{url [, method="GET"] [, header={}] [, query={}] [, size] [, user, password] [, trusted]}
--         -> true | nil, error, details
function methods:request(op)
  local handle = handle_of(self, "request")
  op = merged(arg.table(op, 1, "request"), self.defaults)
  local url = arg.string(op.url, 1, "request{url}")
  self.ended = false
  return py.request(handle, optional(op, "method", "string") or "GET", url, packed(op.query, "request{query}"),
    packed(op.header, "request{header}"), optional(op, "size", "size"), optional(op, "user", "string"),
    optional(op, "password", "string"), optional(op, "trusted", "boolean") or false)
end

-- syntax: http:write(data) -> true | nil, error
function methods:write(data)
  return py.write(handle_of(self, "write"), text(data, 1, "write"))
end

-- ---- responses

-- syntax: http:status() -> code | nil, error
function methods:status()
  return py.status(handle_of(self, "status"))
end

-- Return the results of a read, and note the end of the body.
local function with_end(self, data, ...)
  if data == nil and ... == nil then self.ended = true end
  return data, ...
end

-- syntax: http:read([size | "a"]) -> data | nil at the end | nil, error
-- Without a size: the next data. 0 reads and discards the rest.
function methods:read(size)
  local handle = handle_of(self, "read")
  if self.ended then return nil end
  if size == "a" or size == "*a" then
    local data, message, details = py.read_all(handle)
    if not data then return nil, message, details end
    if message then core.collect() end -- the body is large: Python has stopped the garbage collector
    self.ended = true
    return data
  end
  size = arg.optional(arg.integer, size, nil, 1, "read")
  if size == nil then return with_end(self, py.read(handle)) end
  if size <= 0 then return py.drain(handle) end
  return with_end(self, py.read_bytes(handle, size))
end

-- name, value, name, value, ... as a table, with the first value of each name
local function table_of_pairs(...)
  local fields = {}
  for at = 1, select("#", ...), 2 do
    local name, value = select(at, ...)
    if name ~= nil and fields[name] == nil then fields[name] = value end
  end
  return fields
end

-- syntax: http:header(name) -> value | nil         http:header() -> table
function methods:header(name)
  local handle = handle_of(self, "header")
  local status, message = py.status(handle)
  if not status then return nil, message end
  if name == nil then return table_of_pairs(py.fields(handle)) end
  return py.header(handle, arg.string(name, 1, "header"))
end

-- syntax: for name, value in http:headerpairs() do ... end
function methods:headerpairs()
  local handle = handle_of(self, "headerpairs")
  local list = py.status(handle) and {py.headers(handle)} or {}
  local at = -1
  return function()
    at = at + 2
    return list[at], list[at + 1]
  end
end

local cookies_class = {
  __tostring = function(self)
    local list = {}
    for name, value in pairs(self) do list[#list + 1] = name .. "=" .. value end
    table.sort(list)
    return concat(list, "; ")
  end,
}

-- syntax: http:cookie() -> table of the cookies that the response sets | nil, error
-- The table can be a header of the next request: header = {Cookie = http:cookie()}.
function methods:cookie()
  local handle = handle_of(self, "cookie")
  local status, message = py.status(handle)
  if not status then return nil, message end
  return setmetatable(table_of_pairs(py.cookies(handle)), cookies_class)
end

-- ---- the connection

-- syntax: http:url() -> the address of the last request, after redirects
function methods:url() return py.url(handle_of(self, "url")) end

-- syntax: http:timeout(ms) -> true       the maximum of each wait for the server from now on (default 20000)
function methods:timeout(ms)
  ms = arg.milliseconds(ms, 1, "timeout")
  if ms <= 0 then core.raise("bad argument #1 to 'timeout' (milliseconds above 0 expected)") end
  py.set_timeout(handle_of(self, "timeout"), ms)
  return true
end

-- syntax: http:trusted() -> true | nil, "cn" | "cert" | "certcn" | "none"
-- syntax: http:cipher() -> name, version         http:peername(), http:sockname() -> address, port, isipv6
for _, name in ipairs{"trusted", "cipher", "peername", "sockname", "close"} do
  methods[name] = function(self) return py[name](handle_of(self, name)) end
end

-- syntax: http:certificate() -> table | nil
function methods:certificate()
  local described, message = py.certificate(handle_of(self, "certificate"))
  if described then return core.certificate(described) end
  if message then return nil, message end
end

class.__close = methods.close

-- syntax: httpc.create([{shark, persistent=true, proxy, proxyport, socks, proxyuser, proxypass, proxycon, intf, ipv6, host, maxsize=64 MiB}]) -> http
local function create(op)
  return http.create(op, false)
end

-- syntax: httpc.parsequery("a=1&b=2") -> {a = "1", b = "2"}
local function parsequery(query)
  return table_of_pairs(py.parsequery(arg.string(query, 1, "parsequery")))
end

return {create = create, parsequery = parsequery}
