-- Forms with files: multipart/form-data (spec: bas-api §2.1).
local core, py = ...

local exchange = core.exchange
local pairs, setmetatable = pairs, setmetatable

local CALLBACKS <const> = {"formdata", "beginfile", "filedata", "endmp", "error"}

local function check(callbacks)
  core.arg.table(callbacks, 1, "multipart")
  for _, name in pairs(CALLBACKS) do core.arg.optional(core.arg["function"], callbacks[name], nil, 1, "multipart." .. name) end
  if (callbacks.beginfile == nil) ~= (callbacks.filedata == nil) then
    core.raise("bad argument #1 to 'multipart' (beginfile and filedata belong together)")
  end
end

local CALLBACK_OF <const> = {field = "formdata", file = "beginfile", data = "filedata"}

-- Calls the callback of each event. -> true | nil, "Operation failed", code
local function read(self, handle, callbacks, kind, ...)
  if kind == "end" then
    if callbacks.endmp then callbacks.endmp() end
    return true
  elseif kind == "error" then
    if callbacks.error then callbacks.error(...) end
    return nil, "Operation failed", -1
  elseif kind == false then
    exchange.stop(self)
  end
  local callback = callbacks[CALLBACK_OF[kind]]
  if callback and callback(...) == false then return nil, "Operation failed", -2 end
  return read(self, handle, callbacks, py.next_event(handle))
end

-- syntax: request:multipart(callbacks [, bufsize=8192]) -> true | nil, "Operation failed", code
--   formdata(name, value)   beginfile(name, filename, contenttype, encoding)   filedata(data)   endmp()   error(message)
-- Reading stops when a callback returns false.
function exchange.methods:multipart(callbacks, size)
  local handle = exchange.handle_of(self)
  check(callbacks)
  py.open_form(handle, core.arg.optional(core.arg.integer, size, 8192, 2, "multipart"))
  local _ <close> = setmetatable({}, {__close = function() py.close_form(handle) end})
  return read(self, handle, callbacks, py.next_event(handle))
end
