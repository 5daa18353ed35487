-- HTTP exchanges in Lua: `request` and `response` are the same object with the same methods.
local core, py = ...

local concat, error, pcall, rawget, select, setmetatable, tostring, type, xpcall =
  table.concat, error, pcall, rawget, select, setmetatable, tostring, type, xpcall

local methods = {}
local class = core.class("request", methods)
local environment = {__index = _G}
local exchanges = {} -- handle -> exchange, while its request exists

local exchange = {methods = methods, class = class}
core.exchange = exchange

-- Fields of an exchange:
--   handle        of the exchange in Python; nil when the request has ended
--   environment   of its pages and functions
--   append, take, peek   its output, see output.lua
--   closed        output is rejected: the request has ended, was stopped or sealed, or the client has disconnected
--   taken         the connection was taken over; the page continues
--   stopped       the page and every outer page must end
--   app_          the table of the application whose page ran last
--   body          the whole response, in place of the output
--   session_      with several workers: the session that the page has requested
--   filter        the function that receives the output, see filter.lua

-- Ends the page and every outer page without an error: the error value is nil. When pcall of the application catches it, the next
-- call of a method ends the page, because `stopped` is set.
local function stop(self)
  self.stopped, self.closed = true, true
  error(nil, 0)
end

-- Raises for the use of a closed exchange; returns when only its output is closed.
local function refuse(self)
  if self.stopped then error(nil, 0) end
  if not self.handle then core.raise("request/response expired") end
end

-- Returns the handle of an open exchange; raises for one that has ended or was stopped.
local function handle_of(self)
  if self.closed then refuse(self) end
  return self.handle
end

-- Makes `body` the whole response; later output is ignored.
local function seal(self, body)
  self.body, self.closed = body, true
end

-- Ends the request for the application when the connection was taken over; its page continues.
local function expire(self)
  self.handle, self.closed, self.taken = nil, true, true
end

local function line_printer(append)
  return function(...)
    local count = select("#", ...)
    if count == 1 then
      local text = ...
      return append((type(text) == "string" and text or tostring(text)) .. "\n")
    end
    local words = {...}
    for at = 1, count do words[at] = tostring(words[at]) end
    append(concat(words, "\t", 1, count) .. "\n")
  end
end

local function create(handle)
  local self = setmetatable({handle = handle, refuse = refuse}, class)
  local append, take, peek = core.output(self)
  self.append, self.take, self.peek = append, take, peek
  self.environment = setmetatable({
    request = self,
    response = self,
    print = line_printer(append),
    _emit = append,
  }, environment)
  exchanges[handle] = self
  return self
end

local function fail(self, message)
  core.report_error(message, self.environment)
  self.failure = message
  self.stopped, self.closed = true, true
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

-- Passes the remaining output, then nil, to a filter that is still set.
local function complete_filter(self)
  local filter, rest = self.filter, self.take()
  self.filter = nil
  if rest then filter(rest) end
  filter(nil)
end

-- Ends an exchange after its outermost handler: its methods raise from then on. -> body, failure
local function finish(self, handle)
  if self.filter then run(self, complete_filter, self) end
  if self.session_ then core.shared_attributes.end_page(self.session_) end
  exchanges[handle] = nil
  self.handle, self.closed, self.taken, self.stopped = nil, true, nil, nil
  local rest = self.take(true)
  return self.body or rest, self.failure
end

-- Runs a compiled page. is_outermost: no other handler of this request follows. -> body, failure
local function page(handle, reader, pathname, is_outermost)
  local self = exchanges[handle] or create(handle)
  local compiled = core.dir.handles[reader].pages[pathname]
  self.app_ = compiled.app
  run(self, compiled.chunk, self.environment, pathname, compiled.io, compiled.memory, compiled.app)
  if is_outermost then return finish(self, handle) end
end

-- Sets the variable `app` of the environment for a function; pages have it as a local variable. -> the previous value
local function set_app(self, app)
  local outer = rawget(self.environment, "app")
  self.environment.app = app
  return outer
end

-- Runs a directory function. -> whether it handled the request, body, failure
local function call(handle, directory, relpath, is_outermost)
  local self = exchanges[handle] or create(handle)
  local owner = core.dir.handles[directory]
  if not owner or not owner.func then return false end
  local outer = set_app(self, owner.app)
  local result = run(self, owner.func, self.environment, relpath)
  set_app(self, outer)
  local is_handled = self.stopped or result ~= false
  if is_handled and is_outermost then return true, finish(self, handle) end
  return is_handled
end

local function drop(handle)
  local self = exchanges[handle]
  if self then finish(self, handle) end
end

-- Calls a function of an application before the response. app: the variable of its environment. -> whether it returned, its results
local function consult(self, app, f, ...)
  local outer = set_app(self, app)
  local function results(done, ...)
    set_app(self, outer)
    if done and not self.stopped then return true, ... end
    if not self.stopped then fail(self, ... or "nil") end
    return false
  end
  return results(xpcall(f, with_traceback, ...))
end

-- Returns the exchange of a request, created at its first use.
local function open(handle) return exchanges[handle] or create(handle) end

exchange.stop, exchange.handle_of, exchange.seal, exchange.expire = stop, handle_of, seal, expire
exchange.open, exchange.consult, exchange.finish = open, consult, finish
py.attach(core.ref(page), core.ref(call), core.ref(drop))
