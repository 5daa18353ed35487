-- Common parts of TCP and UDP objects of the LuaSocket layer: timeouts and error texts (spec: bas-api §12, §17).
local core, py = ...

local arg, clock, rawtype, setmetatable = core.arg, core.clock, core.rawtype, setmetatable

local layer = {py = py}
core.luasocket = layer

local WORDS <const> = {
  socketclosed = "closed", sslclosenotify = "closed", sysshutdown = "closed", socketreadfailed = "closed",
  socketwritefailed = "closed", invalidsocketcon = "not connected", cannotconnect = "connection refused",
  cannotresolve = "host or service not provided, or not known", bind = "address already in use",
}

--- Returns LuaSocket's error text for an error word of ba.socket.
function layer.word(word)
  return WORDS[word] or word
end

--- Makes a class whose metatable applications may read: its `__index` is the table of its methods.
function layer.class(name, methods)
  local class = core.class(name, methods)
  class.__metatable = nil
  return class
end

-- syntax: object:settimeout([seconds [, "b" | "t"]]) -> 1       nil or negative: no limit; "b": of each wait, "t": of a whole call
function layer.settimeout(self, seconds, mode)
  seconds = arg.optional(arg.number, seconds, -1, 1, "settimeout")
  mode = arg.optional(arg.string, mode, "b", 2, "settimeout")
  local name = mode == "b" and "block_ms" or (mode == "t" or mode == "r") and "total_ms"
  if not name then core.bad_argument(2, "settimeout", '"b" or "t"', mode) end
  self[name] = seconds >= 0 and arg.milliseconds(seconds * 1000, 1, "settimeout") or nil
  return 1
end

-- syntax: object:gettimeout() -> seconds of each wait, seconds of a whole call       -1 without a limit
function layer.gettimeout(self)
  return self.block_ms and self.block_ms / 1000 or -1, self.total_ms and self.total_ms / 1000 or -1
end

--- Returns a function that returns the limit in milliseconds of the next wait in a call, nil without a limit.
function layer.limit(self)
  local block_ms, end_ms = self.block_ms, self.total_ms and clock() + self.total_ms
  return function()
    if not end_ms then return block_ms end
    local left_ms = end_ms - clock()
    if left_ms < 0 then left_ms = 0 end
    return block_ms and block_ms < left_ms and block_ms or left_ms
  end
end

--- Returns an address, nil for "*", which is every address.
function layer.address(host, index, fname)
  host = arg.string(host, index, fname)
  return host ~= "*" and host or nil
end

--- Returns a port as a number. Accepts strings as well.
function layer.port(port, index, fname)
  if rawtype(port) == "string" then port = math.tointeger(tonumber(port)) or port end
  return arg.integer(port, index, fname)
end

--- Returns a new object of a class, with its statistics at 0.
function layer.new(class, fields)
  fields.born_ms, fields.received, fields.sent = clock(), 0, 0
  return setmetatable(fields, class)
end
