-- Cookies of a request and a response (spec: bas-api §2.1, §2.2).
local core, py = ...

local exchange = core.exchange
local handle_of = exchange.handle_of

local cookie = {}
local class = core.class("cookie", cookie)

local function field(name)
  return function(self, value)
    if value == nil then return self[name .. "_"] end
    self[name .. "_"] = value
    return true
  end
end

for _, name in ipairs{"value", "path", "domain", "maxage", "secure", "httponly", "comment"} do cookie[name] = field(name) end

function cookie:name() return self.name_ end

local ATTRIBUTES = {{"path_", "Path"}, {"domain_", "Domain"}, {"maxage_", "Max-Age"}, {"comment_", "Comment"}}
local FLAGS = {{"secure_", "Secure"}, {"httponly_", "HttpOnly"}}

-- Returns the attributes that are set: name, value, name, ...
local function attributes_of(self, max_age)
  local list = {}
  for _, attribute in ipairs(ATTRIBUTES) do
    local value = self[attribute[1]]
    if attribute[2] == "Max-Age" then value = max_age or value end
    if value ~= nil then list[#list + 1], list[#list + 2] = attribute[2], tostring(value) end
  end
  for _, flag in ipairs(FLAGS) do
    if self[flag[1]] then list[#list + 1], list[#list + 2] = flag[2], true end
  end
  return table.unpack(list)
end

-- Adds the cookie to the response.
function cookie:activate()
  py.add_cookie(handle_of(self.exchange_), self.name_, tostring(self.value_), attributes_of(self))
  return true
end

-- Adds the cookie with an age of 0 to the response: the browser removes it.
function cookie:delete()
  py.add_cookie(handle_of(self.exchange_), self.name_, tostring(self.value_), attributes_of(self, 0))
  return true
end

local function new(owner, name, value)
  return setmetatable({exchange_ = owner, name_ = name, value_ = value}, class)
end

-- syntax: request:cookie(name) -> cookie | nil
function exchange.methods:cookie(name)
  local value = py.cookie(handle_of(self), core.arg.string(name, 1, "cookie"))
  return value and new(self, name, value)
end

-- syntax: response:createcookie(name) -> cookie
function exchange.methods:createcookie(name)
  handle_of(self)
  return new(self, core.arg.string(name, 1, "createcookie"), "")
end
