-- Deferred responses: a page makes one and returns, another activity writes and closes it (spec: bas-api §2.2).
local core, py = ...

local arg, exchange = core.arg, core.exchange
local concat, select, setmetatable, tostring = table.concat, select, setmetatable, tostring

local deferred = {}
local class = core.class("deferred", deferred)

-- syntax: response:deferred() -> deferred response      drops the output of the page
function exchange.methods:deferred()
  local number = py.defer(exchange.handle_of(self))
  self.take()
  exchange.seal(self, nil)
  return setmetatable({handle = number}, class)
end

function deferred:setstatus(code) return py.set_status(self.handle, arg.integer(code, 1, "setstatus")) end

function deferred:setheader(name, value)
  return py.set_header(self.handle, arg.string(name, 1, "setheader"), value ~= nil and tostring(value) or nil)
end

function deferred:setcontentlength(bytes)
  return py.set_header(self.handle, "Content-Length", tostring(arg.integer(bytes, 1, "setcontentlength")))
end

-- syntax: d:write(value, ...) -> true | false when the client has disconnected
function deferred:write(...)
  local text = {...}
  for at = 1, select("#", ...) do text[at] = arg.string(text[at], at, "write") end
  return py.write(self.handle, concat(text), false)
end

-- syntax: d:send(chunk [, total]) -> true | false      sends at once; total: the length of the whole body
function deferred:send(chunk, total)
  if total ~= nil then self:setcontentlength(total) end
  return py.write(self.handle, arg.string(chunk, 1, "send"), true)
end

function deferred:valid() return py.is_valid(self.handle) end

-- syntax: d:close([close_connection])
function deferred:close(close_connection) return py.close(self.handle, close_connection == true) end

function deferred:abort() return py.abort(self.handle) end

class.__close = deferred.close
class.__gc = deferred.abort

-- A response to an upload is completed, not aborted, when the application drops it.
local upload_class = core.class("deferred", deferred)
upload_class.__close, upload_class.__gc = deferred.close, deferred.close

function core.deferred_response(number) return setmetatable({handle = number}, upload_class) end
