-- One HTTP exchange as Lua sees it: `request` and `response` are the same object, an integer handle and a buffer. What a page
-- writes is kept here as a table of strings and crosses to Python once, at the end or when 8 KiB are exceeded.
local core, py = ...

local concat, error, pcall, select, setmetatable, tostring, type, xpcall =
  table.concat, error, pcall, select, setmetatable, tostring, type, xpcall
local isyieldable = core.isyieldable

local LIMIT_BYTES = 8192

local methods = {}
local class = core.class("request", methods)
local environment = {__index = _G}
local exchanges = {} -- handle -> exchange, while its request lives
local error_handler -- set by ba.seterrh

local exchange = {methods = methods, class = class}
core.exchange = exchange

-- Ends the page (and every page around it) without an error: the error value is nil, and the flag makes it final even when
-- the application's pcall catches it.
local function stop(self)
  self.stopped = true
  error(nil, 0)
end

local function refuse(self)
  if self.stopped then error(nil, 0) end
  core.raise("request/response expired")
end

-- The handle of a living exchange; raises for one that ended or was stopped.
local function handle_of(self)
  local handle = self.handle
  if not handle or self.stopped then refuse(self) end
  return handle
end

-- Makes `body` the whole response; what is written later is ignored.
local function seal(self, body)
  self.buffer[1], self.count, self.size = body, 1, #body
  self.sealed = true
end

-- What was buffered, for handing it over; the buffer is empty afterwards.
local function take(self)
  local count = self.count
  if count == 0 then return nil end
  local text = concat(self.buffer, "", 1, count)
  self.count, self.size = 0, 0
  return text
end

local function append(self, text)
  if not self.handle or self.stopped then refuse(self) end
  if self.sealed then return end
  local count = self.count + 1
  self.count = count
  self.buffer[count] = text
  local size = self.size + #text
  self.size = size
  if size > LIMIT_BYTES and isyieldable() then -- else it is kept until it may cross
    self.gone = not py.write(self.handle, take(self)) -- the client went away: nobody reads the rest
    self.sealed = self.gone
  end
end

local function line_printer(self)
  return function(...)
    local count = select("#", ...)
    if count == 1 then
      local text = ...
      append(self, (type(text) == "string" and text or tostring(text)) .. "\n")
      return
    end
    local words = {...}
    for at = 1, count do words[at] = tostring(words[at]) end
    append(self, concat(words, "\t", 1, count) .. "\n")
  end
end

local function begin(handle)
  local self = setmetatable({handle = handle, buffer = {}, count = 0, size = 0, stopped = false, sealed = false}, class)
  self.environment = setmetatable({
    request = self,
    response = self,
    print = line_printer(self),
    _emit = function(text) append(self, text) end,
  }, environment)
  exchanges[handle] = self
  return self
end

local function fail(self, message)
  if error_handler then pcall(error_handler, message, self.environment) end
  self.failure = message
  self.stopped = true
end

local function with_traceback(message)
  if message == nil then return nil end
  return core.traceback(message)
end

local function run(self, f, ...)
  local done, result = xpcall(f, with_traceback, ...)
  if done then return result end
  if not self.stopped then fail(self, result or "nil") end
end

-- Called from Python when the outermost handler is through: body and failure go out, every method raises from now on.
local function finish(self, handle)
  local body, failure = take(self), self.failure
  exchanges[handle] = nil
  self.handle = nil
  return body, failure
end

-- Runs a compiled page. is_outermost: no other handler of this request follows. -> body, failure
local function page(handle, reader, pathname, is_outermost)
  local self = exchanges[handle] or begin(handle)
  local compiled = core.dir.handles[reader].pages[pathname]
  run(self, compiled.chunk, self.environment, pathname, compiled.io, compiled.memory, compiled.app)
  if is_outermost then return finish(self, handle) end
end

-- Runs a directory function. -> whether it handled the request, body, failure
local function call(handle, directory, relpath, is_outermost)
  local self = exchanges[handle] or begin(handle)
  local owner = core.dir.handles[directory]
  if not owner or not owner.func then return false end
  local answer = run(self, owner.func, self.environment, relpath)
  local is_handled = self.stopped or answer ~= false
  if is_handled and is_outermost then return true, finish(self, handle) end
  return is_handled
end

local function drop(handle)
  local self = exchanges[handle]
  if self then finish(self, handle) end
end

exchange.stop, exchange.handle_of, exchange.take, exchange.append = stop, handle_of, take, append
exchange.seal = seal

-- syntax: ba.seterrh(f | nil)      f(message, env) is called for every error of a page or directory function
function ba.seterrh(handler)
  error_handler = core.arg.optional(core.arg["function"], handler, nil, 1, "seterrh")
end

py.attach(core.ref(page), core.ref(call), core.ref(drop))
