-- Logins: user databases, authenticators, authorizers, and the user of a request (spec: bas-api §5).
--
-- The checks are in Python, which calls the functions of applications through this file.
local core, py = ...

local arg, exchange, session = core.arg, core.exchange, core.session
local error, pairs, rawtype, setmetatable, tostring = error, pairs, core.rawtype, setmetatable, tostring

local objects = setmetatable({}, {__mode = "v"}) -- handle -> object

local function class_of(name, methods)
  local class = core.class(name, methods)
  class.__gc = function(self) py.collect(self.handle) end
  return class
end

local authuser, jsonuser, authorizer, acl, authenticator = {}, {}, {}, {}, {}
local authuser_class, jsonuser_class = class_of("authuser", authuser), class_of("jsonuser", jsonuser)
local serverusers = {}
local serverusers_class = class_of("serverusers", serverusers)
local authorizer_class, acl_class = class_of("authorizer", authorizer), class_of("authorizer", acl)
local authenticator_class = class_of("authenticator", authenticator)

local function wrap(class, handle, fields)
  local self = setmetatable(fields or {}, class)
  self.handle = handle
  objects[handle] = self
  return self
end

local function check_one_of(value, first, second, at, name)
  local class = core.getmetatable(value)
  if class ~= first and class ~= second then core.bad_argument(at, name, first.__name .. " or " .. second.__name, value) end
  return value
end

-- ---- user databases

-- syntax: ba.create.authuser(f) -> user database
-- f(username, password, _ENV) returns a password, {HA1}, true (it is correct), or nil; then maxusers, recycle, inactive
function ba.create.authuser(f)
  return wrap(authuser_class, py.new_users(), {f = arg["function"](f, 1, "authuser"), app = core.app_of(f)})
end

-- syntax: ba.create.jsonuser() -> user database
function ba.create.jsonuser() return wrap(jsonuser_class, py.new_table()) end

-- syntax: ba.create.serverusers() -> user database: the server's users file
function ba.create.serverusers() return wrap(serverusers_class, py.new_server_users()) end

local DEPTH <const> = 3 -- of the tables of users and rules: name, field, list

-- Returns a copy without null values: the table may come from ba.json.decode.
local function without_null(value, depth)
  if value == ba.json.null then return nil end
  if depth == 0 or rawtype(value) ~= "table" then return value end
  local copy = {}
  for name, field in pairs(value) do copy[name] = without_null(field, depth - 1) end
  return copy
end

local function table_of(value, name)
  if rawtype(value) ~= "string" then return without_null(arg.table(value, 1, name), DEPTH) end
  local decoded, message = ba.json.decode(value, false) -- false: without null values
  if rawtype(decoded) ~= "table" then return nil, message or "parse" end
  return decoded
end

-- syntax: jsonuser:set(table or JSON text) -> true | nil, error
function jsonuser:set(users)
  local entries, message = table_of(users, "set")
  if not entries then return nil, message end
  return py.set_entries(self.handle, core.table_codec.dump(entries))
end

-- syntax: jsonuser:getpwd(name) -> password or {HA1}, maxusers, recycle, inactive | nil
function jsonuser:getpwd(name)
  local secret, is_ha1, maxusers, recycle, inactive = py.getpwd(self.handle, arg.string(name, 1, "getpwd"))
  if secret == nil then return nil end
  return is_ha1 and {secret} or secret, maxusers, recycle, inactive
end

-- ---- authorizers

-- syntax: jsonuser:authorizer() -> authorizer with rules, see set
function jsonuser:authorizer() return wrap(acl_class, py.new_acl(self.handle), {users = self}) end

serverusers.authorizer = jsonuser.authorizer -- roles are groups

-- syntax: ba.create.authorizer(f) -> authorizer      f(username, method, path, session) -> true
function ba.create.authorizer(f)
  return wrap(authorizer_class, py.new_authorizer(), {f = arg["function"](f, 1, "authorizer")})
end

-- syntax: authorizer:set{name = {urls = {}, methods = {}, roles = {}}} -> true      or the same as JSON text
function acl:set(rules)
  local done, message = table_of(rules, "set")
  if done then done, message = py.set_entries(self.handle, core.table_codec.dump(done)) end
  if not done then core.raise("set: " .. message) end
  return true
end

-- syntax: authorizer:casesensitive([boolean]) -> boolean
function acl:casesensitive(value)
  return py.casesensitive(self.handle, arg.optional(arg.boolean, value, nil, 1, "casesensitive"))
end

local function request_handle(request, name)
  arg.instance(request, exchange.class, 1, name)
  return exchange.handle_of(request)
end

-- Returns the results of a Python function, unless it has ended the page.
local function unless_stopped(request, ...)
  if request.stopped then error(nil, 0) end
  return ...
end

local function unless_refused(request, first, ...)
  if first == false then exchange.stop(request) end -- the body can't be read: the response is an error
  return first, ...
end

-- syntax: authorizer:authorize(request, method, path) -> whether the user of the request has permission
function authorizer:authorize(request, method, path)
  local handle = request_handle(request, "authorize")
  method, path = arg.string(method, 2, "authorize"), arg.string(path, 3, "authorize")
  return unless_stopped(request, py.authorize(self.handle, handle, method, path, request.take()))
end

acl.authorize = authorizer.authorize

-- ---- authenticators

local KINDS <const> = {auth = true, digest = true, basic = true, form = true, sform = true, dav = true}

local function check_kind(op)
  local kind = op.type == nil and "digest" or op.type
  if not KINDS[kind] then
    core.raise("authenticator: unknown type '" .. tostring(kind) .. "' (auth, basic, dav, digest, form or sform expected)")
  end
  if (kind == "form" or kind == "sform") and op.response == nil then
    core.raise("authenticator: type '" .. kind .. "' needs op.response, the function that writes the login page")
  end
  return kind
end

-- syntax: ba.create.authenticator(userdb [, {type=, realm=, response=, tracker=}]) -> authenticator
function ba.create.authenticator(users, op)
  if core.getmetatable(users) ~= serverusers_class then
    check_one_of(users, authuser_class, jsonuser_class, 1, "authenticator")
  end
  if rawtype(op) == "number" then op = nil end -- the second result of mako.udb(), called as the last argument
  op = arg.optional(arg.table, op, {}, 2, "authenticator")
  local kind = check_kind(op)
  local response = arg.optional(arg["function"], op.response, nil, "response", "authenticator")
  local realm = arg.optional(arg.string, op.realm, nil, "realm", "authenticator")
  local tracker = arg.optional(arg.boolean, op.tracker, false, "tracker", "authenticator")
  local handle = py.new_authenticator(users.handle, kind, realm, tracker, response ~= nil)
  return wrap(authenticator_class, handle, {users = users, response = response, app = response and core.app_of(response)})
end

-- syntax: authenticator:authenticate(request, path) -> name, password, type | nil: the response is the login page
function authenticator:authenticate(request, path)
  local handle = request_handle(request, "authenticate")
  path = arg.optional(arg.string, path, "", 2, "authenticate")
  return unless_refused(request, unless_stopped(request, py.authenticate(self.handle, handle, path, request.take())))
end

-- syntax: dir:setauth([authenticator [, authorizer]])      nil removes both
function core.dir.methods:setauth(guard, permits)
  local directory = core.dir.check(self, 1, "setauth")
  arg.optional(function(value) return arg.instance(value, authenticator_class, 1, "setauth") end, guard)
  arg.optional(function(value) return check_one_of(value, authorizer_class, acl_class, 2, "setauth") end, permits)
  directory.auth = {guard, permits} -- not collected before the directory
  py.set_auth(directory.handle, guard and guard.handle or 0, permits and permits.handle or 0)
  return true
end

-- ---- users of requests and sessions

-- syntax: request:user() -> name, password | nil, "basic" | "digest" | "form" | "?"; nil without a login
function exchange.methods:user() return py.user(exchange.handle_of(self)) end

-- syntax: request:login([name [, maxusers=1 [, recycle=true]]]) -> true | false | name of the user who is logged in already
function exchange.methods:login(name, maxusers, recycle)
  local handle = exchange.handle_of(self)
  name = arg.optional(arg.string, name, nil, 1, "login")
  maxusers = arg.optional(arg.positive, maxusers, 1, 2, "login")
  return py.login(handle, name, maxusers, arg.optional(arg.boolean, recycle, true, 3, "login"))
end

-- syntax: request:logout([all]) -> whether a user was logged in
function exchange.methods:logout(all)
  return py.logout(exchange.handle_of(self), arg.optional(arg.boolean, all, false, 1, "logout"))
end

-- syntax: session:user() -> as request:user
function session.methods:user() return py.session_user(session.numbers[self]) end

-- syntax: ba.users() -> names of users who are logged in
function ba.users() return {py.users()} end

-- ---- functions that Python calls
--
-- Each returns whether the request is still open, then the result, or else body and failure of the response.

local function results(self, handle, is_outermost, has_returned, ...)
  if has_returned then return true, ... end
  if is_outermost then return false, exchange.finish(self, handle) end
  return false
end

-- Returns the kind of a secret, the secret, and the limits unchanged.
local function secret_of(value, maxusers, recycle, inactive)
  local kind = rawtype(value)
  if kind == "string" then return "password", value, maxusers, recycle, inactive end
  if kind == "table" and rawtype(value[1]) == "string" then return "ha1", value[1], maxusers, recycle, inactive end
  if value == true then return "verified", nil, maxusers, recycle, inactive end
  return nil
end

local function scalar(value)
  local kind = rawtype(value)
  if kind == "number" or kind == "boolean" then return value end
end

local function found_user(has_returned, value, maxusers, recycle, inactive)
  if not has_returned then return false end
  return true, secret_of(value, scalar(maxusers), scalar(recycle), scalar(inactive))
end

local entries = {}

-- An object is missing when its application was unloaded during the request.

function entries.find(handle, is_outermost, users, name, password)
  local self, owner = exchange.open(handle), objects[users]
  if not owner then return true end
  return results(self, handle, is_outermost, found_user(exchange.consult(self, owner.app, owner.f, name, password, self.environment)))
end

function entries.authorize(handle, is_outermost, permits, name, method, path, number)
  local self, owner = exchange.open(handle), objects[permits]
  local function decide() return owner and owner.f(name, method, path, session.wrap(number)) == true end
  return results(self, handle, is_outermost, exchange.consult(self, nil, decide))
end

-- The stored secret `upwd` comes from the metatable, so that JSON of the table does not include it.
function entries.show(handle, is_outermost, guard, fields, upwd)
  local self, owner = exchange.open(handle), objects[guard]
  local info = setmetatable(core.table_codec.load(fields), {__index = {upwd = upwd}})
  if owner then exchange.consult(self, owner.app, owner.response, self.environment, info) end
  if is_outermost then return exchange.finish(self, handle) end
end

for name, entry in pairs(entries) do py.attach(name, core.ref(entry)) end
