-- require "JSONS": streams of JSON documents over a socket (spec: bas-api §12, §17).
--
-- Over a WebSocket each document is sent as a text message; binary messages are passed to `bincb`. Fragments are joined.
local core = ...

local arg, setmetatable = core.arg, setmetatable

local MAX_DOCUMENT_BYTES <const> = 1 << 20 -- so that a client cannot exhaust the memory
local DOCUMENTS_PER_SLICE <const> = 32     -- that one read contained, before other activities run
local MAX_MESSAGE_BYTES <const> = 65535    -- of a WebSocket message per call

local JSONS = {}
local class = {__index = JSONS, __name = "JSONS", __metatable = "JSONS"}

local function self_of(value, fname)
  return arg.instance(value, class, 1, fname)
end

local function options(op)
  op = arg.optional(arg.table, op, {}, 2, "create")
  return arg.optional(arg.positive, op.maxsize, MAX_DOCUMENT_BYTES, "maxsize", "create"),
    arg.optional(arg["function"], op.bincb, nil, "bincb", "create")
end

-- syntax: JSONS.create(sock [, {maxsize=bytes, bincb=f(data, bytesread, framelen)}]) -> stream
-- maxsize: maximum of one document. bincb: is called with binary messages of a WebSocket; without it they are skipped.
local function create(sock, op)
  arg.instance(sock, core.socket.class, 1, "create")
  local maxsize, bincb = options(op)
  return setmetatable({
    _sock = sock, maxsize = maxsize, bincb = bincb, parser = ba.json.parser(), ready = {}, first = 1, bytes = 0,
  }, class)
end

local function fail(self, word)
  self.failed = word
  return nil, word
end

-- Parse `data`; nil and an error when it is not JSON, or when a document is too large.
local function parse(self, data, is_message)
  local ok, values = self.parser:parse(data, true)
  if not ok then return fail(self, values) end
  local size = (values and not is_message) and 0 or self.bytes + #data
  if size > self.maxsize then return fail(self, "toomuchdata") end
  self.bytes = values and 0 or size
  self.ready, self.first = values or {}, 1
  return true
end

local function next_ready(self)
  local value = self.ready[self.first]
  if value == nil then return nil end
  self.ready[self.first] = nil
  self.first = self.first + 1
  if self.first % DOCUMENTS_PER_SLICE == 0 and core.isyieldable() then core.pause() end
  return value
end

-- Handle data that was read from the socket; nil and an error at its end.
local function receive(self, data, istext, ...)
  if data == nil then return nil, istext, ... end
  if istext == false then
    if self.bincb then self.bincb(data, ...) end
    return true
  end
  return parse(self, data, istext)
end

-- syntax: stream:get([timeout_ms]) -> table | nil, error [, closecode]
-- Returns the next document. After "timeout" the stream remains usable; after "parse" and "toomuchdata" it does not.
function JSONS:get(timeout_ms)
  self_of(self, "get")
  local until_ms = timeout_ms and core.clock() + arg.milliseconds(timeout_ms, 1, "get")
  while true do
    local value = next_ready(self)
    if value ~= nil then return value end
    if self.failed then return nil, self.failed end
    local left_ms = until_ms and until_ms - core.clock()
    local ok, word, code = receive(self, self._sock:read(left_ms and (left_ms > 0 and left_ms or 0)))
    if not ok then return nil, word, code end
  end
end

-- syntax: stream:put(table) -> true | nil, error
function JSONS:put(value)
  self_of(self, "put")
  local text, word = ba.json.encode(arg.table(value, 1, "put"))
  if not text then return nil, word end
  if #text > MAX_MESSAGE_BYTES and self._sock:websocket() then return nil, "toomuchdata" end
  return self._sock:write(text, true)
end

-- syntax: stream:close() -> true | false when it was closed before
function JSONS:close()
  return self_of(self, "close")._sock:close()
end

class.__close = JSONS.close

return {create = create}
