-- Request: the incoming half of the object that is `request` and `response` in pages (spec: bas-api §2.1).
local core, py = ...

local exchange = core.exchange
local methods, handle_of, stop = exchange.methods, exchange.handle_of, exchange.stop
local ipairs, select = ipairs, select

function methods:method() return py.method(handle_of(self)) end

-- Returns names and values in order: name1, value1, name2, ... They are read once per request.
local function parameters(self)
  local handle = handle_of(self)
  local list = self.parameters
  if not list then
    list = py.has_body(handle) and {py.read_parameters(handle)} or {py.parameters(handle)}
    if list[1] == false then stop(self) end
    self.parameters = list
  end
  return list
end

local function first_value(list, name)
  for at = 1, #list, 2 do
    if list[at] == name then return list[at + 1] end
  end
end

local function values(list, name, ...)
  if select("#", ...) == 0 then return first_value(list, name) end
  return first_value(list, name), values(list, ...)
end

-- syntax: request:data() -> table      request:data(name, ...) -> value, ...
function methods:data(...)
  local list = parameters(self)
  if select("#", ...) > 0 then return values(list, ...) end
  local all = {}
  for at = 1, #list, 2 do all[list[at]] = list[at + 1] end
  return all
end

function methods:datapairs()
  local list, at = parameters(self), -1
  return function()
    at = at + 2
    return list[at], list[at + 1]
  end
end

-- syntax: request:header() -> table      request:header(name) -> value | nil
function methods:header(name)
  local handle = handle_of(self)
  if name ~= nil then return py.header(handle, core.arg.string(name, 1, "header")) end
  local list, all = {py.headers(handle)}, {}
  for at = 1, #list, 2 do all[list[at]] = list[at + 1] end
  return all
end

function methods:uri() return py.uri(handle_of(self)) end

function methods:url(tls) return py.url(handle_of(self), tls == true) end

function methods:domain() return py.domain(handle_of(self)) end

function methods:peername() return py.peername(handle_of(self)) end

function methods:sockname() return py.sockname(handle_of(self)) end

function methods:issecure() return py.issecure(handle_of(self)) end

function methods:version() return py.version(handle_of(self)) end

function methods:setnodelay(on) return py.setnodelay(handle_of(self), on ~= false) end

-- syntax: request:cipher() -> name, TLS version | nil without TLS
function methods:cipher() return py.cipher(handle_of(self)) end

-- syntax: request:certificate() -> table | nil when the client sent none
--         request:clientcert()      the same
function methods:certificate() return core.certificate(py.certificate(handle_of(self))) end
methods.clientcert = methods.certificate

function methods:env()
  handle_of(self)
  return self.environment
end

-- Ends the page with the list of allowed methods when the method of the request is not in the list.
function methods:allow(list, defaults)
  local handle = handle_of(self)
  local allowed = {}
  for at, method in ipairs(core.arg.table(list, 1, "allow")) do allowed[at] = core.arg.string(method, 1, "allow") end
  if py.allow(handle, table.concat(allowed, " "), defaults ~= false) then return true end
  self.take()
  stop(self)
end

-- Ends the page with 304 unless the resource is newer than the client's copy.
function methods:checktime(time)
  if py.is_newer(handle_of(self), core.arg.time(core.arg.integer(time, 1, "checktime"), 1, "checktime")) then return true end
  self.take()
  stop(self)
end

-- syntax: for chunk in request:rawrdr([size]) do ... end
function methods:rawrdr(size)
  local handle = handle_of(self)
  size = size == nil and 1024 or core.arg.integer(size, 1, "rawrdr")
  py.open_body(handle, size)
  return function()
    local piece = py.read_body(handle_of(self))
    if piece == false then stop(self) end
    return piece
  end
end
