-- Response: the outgoing half of the object that is `request` and `response` in pages (spec: bas-api §2.2).
local core, py = ...

local exchange = core.exchange
local methods, handle_of, stop, seal = exchange.methods, exchange.handle_of, exchange.stop, exchange.seal
local error, select, tostring, type = error, select, tostring, type

local function check_uncommitted(self)
  local handle = handle_of(self)
  if self.closed or py.committed(handle) then core.raise("iscommitted") end
  return handle
end

-- syntax: response:write(value, ...) -> bytes      strings and numbers, without separators
function methods:write(...)
  local bytes, append = 0, self.append
  for at = 1, select("#", ...) do
    local value = select(at, ...)
    local kind = type(value)
    if kind == "number" then
      value = tostring(value)
    elseif kind ~= "string" then
      core.bad_argument(at, "write", "string or number", value)
    end
    append(value)
    bytes = bytes + #value
  end
  if self.closed and not self.body then return nil, "socketclosed" end
  return bytes
end

-- syntax: response:setheader(name, value | nil [, name, value ...])
function methods:setheader(...)
  local handle = check_uncommitted(self)
  for at = 1, select("#", ...), 2 do
    local name, value = select(at, ...)
    name = core.arg.string(name, at, "setheader")
    if value == nil then
      py.remove_header(handle, name)
    else
      py.set_header(handle, name, tostring(value))
    end
  end
  return true
end

function methods:containsheader(name)
  return py.response_header(handle_of(self), core.arg.string(name, 1, "containsheader")) or false
end

function methods:setstatus(code)
  py.set_status(check_uncommitted(self), core.arg.integer(code, 1, "setstatus"))
  return true
end

function methods:getstatus() return py.status(handle_of(self)) end

function methods:setcontenttype(value, force)
  local handle = check_uncommitted(self)
  value = core.arg.string(value, 1, "setcontenttype")
  if force ~= false or not py.response_header(handle, "Content-Type") then py.set_header(handle, "Content-Type", value) end
  return true
end

function methods:setcontentlength(bytes)
  py.set_header(check_uncommitted(self), "Content-Length", tostring(core.arg.integer(bytes, 1, "setcontentlength")))
  return true
end

function methods:setdateheader(name, time)
  local handle = check_uncommitted(self)
  py.set_date_header(handle, core.arg.string(name, 1, "setdateheader"), core.arg.integer(time, 2, "setdateheader"))
  return true
end

function methods:setmaxage(seconds)
  local value = "max-age=" .. core.arg.integer(seconds, 1, "setmaxage")
  py.set_header(check_uncommitted(self), "Cache-Control", value)
  return true
end

function methods:setdefaultheaders()
  py.set_header(check_uncommitted(self), "Content-Type", "text/html; charset=utf-8")
  return true
end

-- syntax: response:json(table [, table ...] [, continue=false])      ends the page unless `continue` is set
function methods:json(...)
  local count = select("#", ...)
  local continues = false
  if count > 1 and type((select(count, ...))) == "boolean" then
    continues, count = select(count, ...), count - 1
  end
  local handle = check_uncommitted(self)
  local texts = {}
  for at = 1, count > 0 and count or 1 do
    local value = core.arg.table(select(at, ...), at, "json")
    local text, message = ba.json.encode(value)
    if not text then core.raise("can't encode as JSON: " .. tostring(message)) end
    texts[at] = text
  end
  local text = count == 1 and texts[1] or "[" .. table.concat(texts, ",") .. "]"
  py.set_json_headers(handle)
  seal(self, text)
  if not continues then stop(self) end
  return true
end

-- syntax: response:sendredirect(url [, permanent [, continue]])
function methods:sendredirect(url, permanent, continues)
  local handle = check_uncommitted(self)
  py.redirect(handle, core.arg.string(url, 1, "sendredirect"), permanent == true)
  seal(self, "")
  if not continues then stop(self) end
  return true
end

-- syntax: response:senderror(code [, html])      the page continues; its later output is ignored
function methods:senderror(code, html)
  local handle = check_uncommitted(self)
  seal(self, py.error_body(handle, core.arg.integer(code, 1, "senderror"), html ~= nil and tostring(html) or nil))
  return true
end

-- Takes the output so far for a Python function. With a filter, the filter gets the output and this returns nil.
local function take_output(self)
  local text = self.take()
  if not (text and self.filter) then return text end
  self.filter(text)
  return nil -- explicit: Python functions count their arguments
end

-- Raises when an inner page failed or was stopped, which ends the outer pages as well.
local function check_inner(self, ok, message)
  if self.stopped then error(nil, 0) end
  if ok == false then stop(self) end
  if not ok then core.raise(message) end
end

function methods:include(path)
  path = core.arg.string(path, 1, "include")
  check_inner(self, py.include(handle_of(self), path, take_output(self)))
  return true
end

-- Makes a method that continues the request at another path by the Python function `op`.
local function forward_method(name, op)
  return function(self, path, continues)
    path = core.arg.string(path, 1, name)
    local handle = check_uncommitted(self)
    local text = self.take()
    local ok, message = op(handle, path)
    if not ok and text and not self.stopped then self.append(text) end -- no response: the page continues with its output
    check_inner(self, ok, message)
    if not continues then stop(self) end
    return true
  end
end

methods.forward = forward_method("forward", py.forward)
methods.redirect = forward_method("redirect", py.redirect_inside)

function methods:abort()
  if not self.taken then handle_of(self) end
  stop(self)
end

function methods:flush()
  return py.flush(handle_of(self), take_output(self)) or false
end

-- Sends bytes of the body unchanged. Raises while output of `write` waits and the headers are not sent.
function methods:send(text)
  local handle = handle_of(self)
  text = core.arg.string(text, 1, "send")
  local _, waiting = self.peek()
  if waiting > 0 and not py.committed(handle) then core.raise("mixingwritesend") end
  return py.flush(handle, (self.take() or "") .. text) or false
end

local RESETS = {all = true, headers = true, buffer = true}

function methods:reset(what)
  what = what or "all"
  if not RESETS[what] then core.raise("bad argument #1 to 'reset' (\"all\", \"headers\" or \"buffer\" expected)") end
  local handle = check_uncommitted(self)
  if what ~= "headers" then self.take() end
  py.reset(handle, what)
  return true
end

function methods:committed() return self.closed or py.committed(handle_of(self)) end

function methods:initial() return py.initial(handle_of(self)) end

function methods:isinclude() return py.is_include(handle_of(self)) end

function methods:isforward() return py.is_forward(handle_of(self)) end

function methods:valid() return self.handle ~= nil and not self.closed and py.is_valid(self.handle) end

function methods:bytecount() return py.byte_count(handle_of(self)) + select(2, self.peek()) end

function methods:writesize()
  handle_of(self)
  return (select(2, self.peek()))
end

-- Returns the output that is not sent yet.
function methods:getdata()
  handle_of(self)
  return (self.peek())
end

function methods:encodeurl(url) return core.arg.string(url, 1, "encodeurl") end

-- syntax: response:encoderedirecturl(url [, params [, session]])
function methods:encoderedirecturl(url, parameters)
  local handle = handle_of(self)
  url = core.arg.string(url, 1, "encoderedirecturl")
  return py.absolute_url(handle, url, parameters == true)
end

function methods:setbasic(realm)
  local quoted = core.arg.string(realm, 1, "setbasic"):gsub('["\\]', "\\%0")
  return self:setheader("WWW-Authenticate", 'Basic realm="' .. quoted .. '"')
end

function methods:redirect2tls()
  if self:issecure() then return false end
  return self:sendredirect(self:url(true))
end

function methods:clearkeepalive()
  py.set_header(check_uncommitted(self), "Connection", "close")
  return true
end
