-- Sessions (spec: bas-api §5). A session is a table in which applications store attributes.
local core, py = ...

local exchange, shared = core.exchange, core.shared_attributes -- shared: nil without several workers
local pairs, setmetatable, tostring = pairs, setmetatable, tostring

local methods = {}
local class = core.class("session", methods)
local numbers = setmetatable({}, {__mode = "k"}) -- object -> number
local objects = {} -- number -> object, while the session exists
local attributes = setmetatable({}, {__mode = "k"}) -- object -> its attributes

function class.__index(self, name)
  return methods[name] or attributes[self][name]
end

function class.__newindex(self, name, value)
  if methods[name] then core.raise("'" .. tostring(name) .. "' is a method of sessions; choose another name") end
  if shared then return shared.set(self, name, value) end
  attributes[self][name] = value
end

if shared then
  function class.__index(self, name)
    local method = methods[name]
    if method ~= nil then return method end
    return shared.get(self, name)
  end
end

local function create(number)
  local self = {}
  numbers[self], attributes[self], objects[number] = number, {}, self
  if shared then shared.begin(self, number, attributes[self]) end
  return setmetatable(self, class)
end

local function wrap(number)
  local self = objects[number] or create(number)
  if shared then shared.refresh(self) end
  return self
end

-- Returns the session of a request, whose page may change tables in place until it ends.
local function wrap_for(request, number)
  local self = wrap(number)
  if shared then request.session_ = self end
  return self
end

local function terminated(number)
  local self = objects[number]
  objects[number] = nil
  if self and shared then shared.forget(self) end
  local onterminate = self and attributes[self].onterminate
  if core.rawtype(onterminate) == "function" then onterminate(self) end
end

-- syntax: request:session([create]) -> session | false      create: makes one, and its cookie, when there is none
function exchange.methods:session(create)
  local handle = exchange.handle_of(self)
  local number = py.session(handle, core.arg.optional(core.arg.boolean, create, false, 1, "session"))
  return number and wrap_for(self, number)
end

local function by_url(path)
  local id, rest = path:match"^/?([%w_-]+)/?(.*)$"
  local number = id and #id == 24 and py.by_id(id)
  if not number then return nil end
  return wrap(number), rest
end

-- syntax: ba.session(number) -> session | nil
--         ba.session(request, relpath [, set]) -> session, rest of the path | nil      its first segment is the session's id
-- set: makes it the session of the request, as if the request had its cookie.
function ba.session(first, path, set)
  if core.getmetatable(first) == exchange.class then
    path, set = core.arg.string(path, 2, "session"), core.arg.optional(core.arg.boolean, set, false, 3, "session")
    local session, rest = by_url(path)
    if not session then return nil end
    first.session_ = shared and session or nil
    if set then py.adopt(exchange.handle_of(first), numbers[session]) end
    return session, rest
  end
  local number = core.arg.integer(first, 1, "session")
  if py.exists(number) then return wrap(number) end
end

-- syntax: ba.sessions([user]) -> the numbers of all sessions, or of a user who is logged in
function ba.sessions(user)
  return {py.numbers(core.arg.optional(core.arg.string, user, nil, 1, "sessions"))}
end

-- syntax: session:id([text]) -> number, or with true the 24 characters of the cookie
function methods:id(text)
  return text and py.id(numbers[self]) or numbers[self]
end

-- Returns a copy of the attributes.
function methods:attributes()
  local copy = {}
  if shared then shared.watch(self) end
  for name, value in pairs(attributes[self]) do copy[name] = value end
  return copy
end

function methods:terminate() return py.terminate(numbers[self]) end

function methods:maxinactiveinterval(seconds)
  return py.max_inactive(numbers[self], core.arg.optional(core.arg.integer, seconds, nil, 1, "maxinactiveinterval"))
end

function methods:creationtime() return py.created(numbers[self]) end

function methods:lastaccessedtime(touch) return py.accessed(numbers[self], touch == true) end

function methods:peername() return py.peername(numbers[self]) end

function methods:usecounter() return py.uses(numbers[self]) end

-- Between lock and release the session does not expire.
function methods:lock() return py.hold(numbers[self], 1) end

function methods:release() return py.hold(numbers[self], -1) end

core.session = {wrap = wrap, methods = methods, numbers = numbers}
py.attach(core.ref(terminated))
