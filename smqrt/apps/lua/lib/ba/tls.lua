-- TLS objects: trusted certificates, own certificates, and the clients and servers that use them (spec: bas-api §10).
local core, py = ...

local arg, find, gsub, match, setmetatable = core.arg, string.find, string.gsub, string.match, setmetatable

local store, tls = {}, {}
local store_class, cert_class, tls_class = core.class("certstore", store), core.class("sharkcert", {}), core.class("sharkssl", tls)

local function collected(self) py.drop(self.handle) end
store_class.__gc, cert_class.__gc, tls_class.__gc = collected, collected, collected

local function wrap(class, handle, ...)
  if not handle then return nil, ... end
  return setmetatable({handle = handle}, class)
end

core.tls = {}
ba.create = ba.create or {}

--- Returns the number of a TLS object, for other parts of the API; raises when `value` is not a TLS object.
-- side: the required kind, "client" or "server"; nil for either.
function core.tls.check(value, index, fname, side)
  local self = arg.instance(value, tls_class, index, fname)
  if side and self.side ~= side then core.bad_argument(index, fname, "TLS " .. side, value) end
  return self.handle
end

--- Returns the table that describes a certificate, from the JSON text of Python; nil for nil.
function core.certificate(text)
  return text and ba.json.decode(text)
end

-- syntax: ba.parsecert(data) -> {subject, issuer, commonname, subjectaltnames, tzfrom, tzto, serial} | nil
function ba.parsecert(data)
  return core.certificate(py.describe(arg.string(data, 1, "parsecert")))
end

-- syntax: ba.parsecerttime(text) -> Unix time | nil. Accepts times of ASN.1, and those of ba.parsecert.
function ba.parsecerttime(text)
  text = arg.string(text, 1, "parsecerttime")
  local digits = match(text, "^(%d+)Z$") or ""
  if #digits == 12 then digits = (digits < "5" and "20" or "19") .. digits end -- the century: RFC 5280 4.1.2.5
  if #digits == 14 then text = gsub(digits, "^(....)(..)(..)(..)(..)(..)$", "%1-%2-%3T%4:%5:%6Z") end
  local date = find(text, "^%d%d%d%d%-") and ba.datetime(text)
  return date and date:ticks() or nil
end

-- Returns the content of a file in an io object, or nil and an error word.
local function content(io, name, index, fname)
  core.io.check(io, index, fname)
  local file, message = io:open(arg.string(name, index + 1, fname))
  if not file then return nil, message end
  local data, fault = file:read("a")
  file:close()
  return data, fault
end

-- syntax: ba.create.certstore() -> store
function ba.create.certstore()
  return wrap(store_class, py.new_store())
end

-- syntax: store:addcert(io, name) -> how many were added | nil, error, reason
function store:addcert(io, name)
  local handle = arg.instance(self, store_class, 1, "addcert").handle
  local data, message = content(io, name, 1, "addcert")
  if not data then return nil, message end
  return py.add_to_store(handle, data)
end

--- Returns a certificate with its key, both given as PEM text.
function core.tls.identity(cert, key, password)
  return wrap(cert_class, py.new_identity(cert, key, password))
end

-- syntax: ba.create.sharkcert(io, cert, key [, password]) -> certificate | nil, error, reason        files
--         ba.create.sharkcert(cert, key [, password])                                               PEM text
function ba.create.sharkcert(io, cert, key, password)
  if core.rawtype(io) == "string" or core.rawtype(io) == "number" then
    return core.tls.identity(tostring(io), arg.string(cert, 2, "sharkcert"), arg.optional(arg.string, key, nil, 3, "sharkcert"))
  end
  local cert_data, message = content(io, cert, 1, "sharkcert")
  if not cert_data then return nil, message end
  local key_data, fault = content(io, key, 1, "sharkcert")
  if not key_data then return nil, fault end
  if password == "sharkssl" then password = nil end -- older applications name a file format here
  return core.tls.identity(cert_data, key_data, arg.optional(arg.string, password, nil, 4, "sharkcert"))
end

local function new_tls(handle, side)
  local self = wrap(tls_class, handle)
  self.side = side
  return self
end

local default

-- syntax: ba.sharkclient() -> the TLS client that trusts the authorities of this machine
function ba.sharkclient()
  default = default or new_tls(py.default_client(), "client")
  return default
end

-- syntax: ba.create.sharkssl([store] [, {server = true}]) -> TLS client or server
function ba.create.sharkssl(first, op)
  if core.type(first) == "table" and op == nil then first, op = nil, first end
  op = arg.optional(arg.table, op, {}, 2, "sharkssl")
  local trusted = first ~= nil and arg.instance(first, store_class, 1, "sharkssl").handle or nil
  if op.server then return new_tls(py.new_server(trusted), "server") end
  return new_tls(py.new_client(trusted), "client")
end

-- syntax: tls:addcert(certificate) -> true
function tls:addcert(certificate)
  local handle = arg.instance(self, tls_class, 1, "addcert").handle
  return py.add_identity(handle, arg.instance(certificate, cert_class, 2, "addcert").handle)
end
