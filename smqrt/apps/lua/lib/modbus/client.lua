-- require "modbus.client": Modbus TCP client ("MODBUS Messaging on TCP/IP Implementation Guide V1.0b", "MODBUS Application Protocol
-- V1.1b3").
--
-- Calls of a blocking client wait for the response. Calls of an asynchronous client (op.async) return the transaction number, and the
-- cosocket of the connection runs the callback. Any error, including an exception of the server, closes the connection.
local core = ...

local arg, byte, char, concat, floor, ipairs, min, pack =
  core.arg, string.byte, string.char, table.concat, math.floor, ipairs, math.min, string.pack
local raise, rawtype, select, setmetatable, sub, tointeger, tostring, unpack, xpcall =
  core.raise, core.rawtype, select, setmetatable, string.sub, math.tointeger, tostring, string.unpack, xpcall

local PORT <const>, TLS_PORT <const> = 502, 802
local TIMEOUT_MS <const> = 5000
local UNIT <const> = 1
local MAX_PENDING <const> = 256     -- transactions of an asynchronous client without a response
local MAX_UNEXPECTED <const> = 100  -- responses without a request
local MAX_PDU_BYTES <const> = 253
local EXCEPTION <const> = 0x80

local FC <const> = {rcoil = 1, discrete = 2, rholding = 3, register = 4, wcoil = 5, wword = 6, wcoils = 15, wwords = 16, readwrite = 23}
local MAX_VALUES <const> = {rbits = 2000, wbits = 1968, rwords = 125, wwords = 123, readwrite = 121} -- of a request
local TYPES <const> = { -- bytes, format of string.pack, maximum of an integer
  word = {2, ">I2", 0xFFFF}, dword = {4, ">I4", 0xFFFFFFFF}, float = {4, ">f"}, double = {8, ">d"}, string = {1},
}

local methods = {}
local class = {__index = methods, __name = "modbus", __metatable = "modbus"}

-- ---- values

local function bad_range(index, fname, what, value)
  raise("bad argument #" .. index .. " to '" .. fname .. "' (" .. what .. " expected, got " .. tostring(value) .. ")")
end

local function check_address(address, count, max_count, fname)
  arg.integer(address, 1, fname)
  if address < 0 or address > 0xFFFF then bad_range(1, fname, "an address from 0 to 65535", address) end
  max_count = min(max_count, 0x10000 - address)
  if count < 1 or count > max_count then bad_range(2, fname, "1 to " .. max_count .. " bits or words", count) end
end

local function bits_of(values, index, fname)
  local bytes = {} -- at most 246, so that `unpack` can return them
  for at, value in ipairs(values) do
    if rawtype(value) ~= "boolean" then core.bad_argument(index, fname, "boolean", value) end
    local place = (at - 1) // 8 + 1
    bytes[place] = (bytes[place] or 0) | (value and 1 << (at - 1) % 8 or 0)
  end
  return char(table.unpack(bytes))
end

local function one_word(value, kind, index, fname)
  local format, mask = kind[2], kind[3]
  if rawtype(value) ~= "number" then core.bad_argument(index, fname, "number", value) end
  if not mask then return pack(format, value) end
  local whole, lowest = tointeger(value) or tointeger(floor(value)), -(mask >> 1) - 1 -- signed or unsigned
  if not whole or whole < lowest or whole > mask then bad_range(index, fname, "a number from " .. lowest .. " to " .. mask, value) end
  return pack(format, whole & mask)
end

-- The bytes of a value or of an array of values; a string, padded to whole words.
local function words_of(address, value, vtype, max_count, fname)
  if value == nil then core.bad_argument(2, fname, "number, string or table", value) end
  if rawtype(value) == "string" then vtype = "string" end
  if vtype == "string" then
    local text = arg.string(value, 2, fname)
    check_address(address, (#text + 1) // 2, max_count, fname)
    return #text % 2 == 1 and text .. "\0" or text
  end
  local values = core.type(value) == "table" and value or {value}
  local kind, parts = TYPES[vtype], {}
  check_address(address, #values * kind[1] // 2, max_count, fname)
  for at, one in ipairs(values) do parts[at] = one_word(one, kind, 2, fname) end
  return concat(parts)
end

local function read_bits(data, count)
  local values = {}
  for at = 0, count - 1 do values[at + 1] = byte(data, at // 8 + 1) >> at % 8 & 1 == 1 end
  return values
end

local function read_words(data, count, vtype)
  if vtype == "string" then return sub(data, 1, count) end
  local values, kind = {}, TYPES[vtype]
  for at = 1, count do values[at] = unpack(kind[2], data, (at - 1) * kind[1] + 1) end
  return values
end

-- ---- the connection

-- Call a function of the application; an error is logged.
local function call_back(f, ...)
  local ok, message = xpcall(f, core.traceback, ...)
  if not ok then core.log_error("Modbus callback failed: " .. message) end
end

local function fail(self, word)
  if not self.is_open then return nil, word end
  self.is_open, self.fault = false, word
  if self.timer then self.timer:cancel() end
  self.sock:close()
  local queue, first = self.queue, self.first
  self.queue, self.first, self.next = {}, 1, 1
  for at = first, first + MAX_PENDING do
    if queue[at] then call_back(queue[at].callback, nil, word, queue[at].number, self) end
  end
  if self.onclose then call_back(self.onclose, word, self) end
  return nil, word
end

-- Transaction number and PDU of the next response; nil when it is incomplete; nil and an error when it is invalid.
local function next_frame(self)
  local data, at = self.received, self.at
  if #data - at < 5 then return nil end
  local number, protocol, length = unpack(">I2I2I2", data, at)
  if protocol ~= 0 or length < 3 or length > MAX_PDU_BYTES + 1 then return nil, "invalidresp" end
  if #data - at < 5 + length then return nil end
  self.at = at + 6 + length
  return number, sub(data, at + 7, self.at - 1)
end

local function append(self, data)
  self.received, self.at = sub(self.received, self.at) .. data, 1
end

-- Count an ignored response; return "invalidresp" when there are too many.
local function count_unexpected(self)
  self.unexpected = self.unexpected + 1
  if self.unexpected > MAX_UNEXPECTED then return "invalidresp" end
end

-- The result in the PDU of a response: a value, or nil and the code of an exception or "invalidresp".
local function result_of(one, pdu)
  local code = byte(pdu)
  if code == one.code | EXCEPTION and #pdu == 2 then return nil, byte(pdu, 2) end
  if code ~= one.code then return nil, "invalidresp" end
  if one.echo then
    if sub(pdu, 2) ~= one.echo then return nil, "invalidresp" end
    return true
  end
  local data = sub(pdu, 3)
  if byte(pdu, 2) ~= #data or #data ~= one.bytes then return nil, "invalidresp" end
  return one.read(data, one.count, one.vtype)
end

local function new_number(self)
  self.number = self.number % 0xFFFF + 1
  return self.number
end

local function frame_of(number, unit, pdu)
  return pack(">I2I2I2B", number, 0, #pdu + 1, unit) .. pdu
end

-- ---- blocking clients

local function wait_for_response(self, number, until_ms)
  while true do
    local found, pdu = next_frame(self)
    if found == number then return pdu end
    local fault = found and count_unexpected(self) or not found and pdu
    if fault then return nil, fault end
    if not found then
      local left_ms = until_ms - core.clock()
      if left_ms <= 0 then return nil, "timeout" end
      local data, word = self.sock:read(left_ms)
      if not data then return nil, word end
      append(self, data)
    end
  end
end

local Transaction = {__close = function(transaction) -- also when the caller is killed: the response would then be outstanding
  local self = transaction.client
  self.is_busy = false
  if transaction.is_complete then return end
  self.is_open, self.fault = false, "socketclosed"
  self.sock:close()
end}

local function blocking(self, one, pdu)
  local until_ms = core.clock() + self.timeout_ms
  while self.is_busy do
    if core.clock() >= until_ms then return nil, "timeout" end
    core.sleep(1)
  end
  if not self.is_open then return nil, "socketclosed" end
  self.is_busy = true
  local transaction <close> = setmetatable({client = self}, Transaction)
  local number = new_number(self)
  local response, word = self.sock:write(frame_of(number, one.unit, pdu))
  if response then response, word = wait_for_response(self, number, until_ms) end
  transaction.is_complete = true
  if not response then return fail(self, word) end
  local value, fault = result_of(one, response)
  if value == nil then return fail(self, fault) end
  return value
end

-- ---- asynchronous clients

-- Send the first request of the queue. Only one is sent at a time: many servers do not support more.
local function send_next(self)
  local one = self.queue[self.first]
  if not one or not self.is_open then return end
  local sent, word = self.sock:write(frame_of(one.number, one.unit, one.pdu))
  if sent then return self.timer:set(self.timeout_ms, true) end
  return fail(self, rawtype(word) == "number" and "socketwritefailed" or word)
end

local function asynchronous(self, one, pdu)
  if not self.is_open then return nil, "socketclosed" end
  if self.next - self.first >= MAX_PENDING then return nil, "full" end
  one.number, one.pdu = new_number(self), pdu
  self.queue[self.next], self.next = one, self.next + 1
  if self.next - self.first == 1 then send_next(self) end
  if not self.is_open then return nil, self.fault end
  return one.number
end

local function handle_response(self, number, pdu)
  local one = self.queue[self.first]
  if not one or one.number ~= number then
    local fault = count_unexpected(self)
    return fault and fail(self, fault)
  end
  self.timer:cancel()
  local value, fault = result_of(one, pdu)
  self.queue[self.first], self.first = nil, self.first + 1
  if value ~= nil then send_next(self) end
  call_back(one.callback, value, fault, number, self)
  if value == nil then fail(self, fault) end
end

local function receive(self)
  while self.is_open do
    local number, pdu = next_frame(self)
    if number then
      handle_response(self, number, pdu)
    elseif pdu then
      fail(self, pdu)
    else
      local data, word = self.sock:read()
      if not data then return fail(self, word) end
      append(self, data)
    end
  end
end

-- ---- requests

-- The optional arguments, in any order: vtype (string), unit (number), callback (function).
local function options(self, fname, ...)
  local one = {vtype = "word", unit = self.unit}
  for at = 1, select("#", ...) do
    local value = (select(at, ...))
    local kind = rawtype(value)
    if kind == "string" then
      if not TYPES[value] then bad_range(at + 2, fname, "word, dword, float, double or string", value) end
      one.vtype = value
    elseif kind == "number" then
      one.unit = arg.integer(value, at + 2, fname)
      if value < 0 or value > 255 then bad_range(at + 2, fname, "a unit from 0 to 255", value) end
    elseif kind == "function" then
      one.callback = value
    elseif value ~= nil then
      core.bad_argument(at + 2, fname, "type, unit or callback", value)
    end
  end
  if self.is_async and not one.callback then raise("bad argument to '" .. fname .. "' (an asynchronous client needs a callback)") end
  if one.callback and not self.is_async then raise("bad argument to '" .. fname .. "' (a callback needs connect(addr, {async = true}))") end
  return one
end

local function self_of(value, fname)
  return arg.instance(value, class, 0, fname)
end

local function transact(self, one, pdu)
  return (self.is_async and asynchronous or blocking)(self, one, pdu)
end

local function first_of(value, ...)
  if core.type(value) == "table" then return value[1] end
  return value, ...
end

local function reading(fname, is_bits)
  local function call(self, address, count, ...)
    self_of(self, fname)
    if count ~= nil and rawtype(count) ~= "number" then return call(self, address, nil, count, ...) end -- `len` was omitted
    local one = options(self, fname, ...)
    local is_single = count == nil
    count = is_single and 1 or arg.integer(count, 2, fname)
    one.code, one.count, one.read = FC[fname], count, is_bits and read_bits or read_words
    local amount = is_bits and count or (count * TYPES[one.vtype][1] + 1) // 2
    check_address(address, amount, is_bits and MAX_VALUES.rbits or MAX_VALUES.rwords, fname)
    one.bytes = is_bits and (count + 7) // 8 or 2 * amount
    if is_single then
      local read = one.read
      one.read = function(...) return (first_of(read(...))) end
    end
    return transact(self, one, pack(">BI2I2", one.code, address, amount))
  end
  return call
end

-- syntax: modbus:rcoil(addr [, len] [, unit] [, callback]) -> array of booleans, or one boolean without len | nil, error
methods.rcoil = reading("rcoil", true)
-- syntax: modbus:discrete(addr [, len] [, unit] [, callback]) -> as rcoil, for discrete inputs
methods.discrete = reading("discrete", true)
-- syntax: modbus:rholding(addr [, len] [, vtype] [, unit] [, callback]) -> array of numbers, or one number without len, or a string
--         | nil, error
methods.rholding = reading("rholding")
-- syntax: modbus:register(addr [, len] [, vtype] [, unit] [, callback]) -> as rholding, for input registers
methods.register = reading("register")

-- syntax: modbus:wcoil(addr, boolean | array [, unit] [, callback]) -> true | nil, error
function methods:wcoil(address, value, ...)
  self_of(self, "wcoil")
  local one = options(self, "wcoil", ...)
  if core.type(value) ~= "table" then
    check_address(address, 1, 1, "wcoil")
    one.code, one.echo = FC.wcoil, pack(">I2I2", address, arg.boolean(value, 2, "wcoil") and 0xFF00 or 0)
    return transact(self, one, pack("B", one.code) .. one.echo)
  end
  check_address(address, #value, MAX_VALUES.wbits, "wcoil")
  one.code, one.echo = FC.wcoils, pack(">I2I2", address, #value)
  return transact(self, one, pack("B", one.code) .. one.echo .. pack("s1", bits_of(value, 2, "wcoil")))
end

-- syntax: modbus:wholding(addr, number | array | string [, vtype] [, unit] [, callback]) -> true | nil, error
function methods:wholding(address, value, ...)
  self_of(self, "wholding")
  local one = options(self, "wholding", ...)
  local data = words_of(address, value, one.vtype, MAX_VALUES.wwords, "wholding")
  if rawtype(value) == "number" and #data == 2 then
    one.code, one.echo = FC.wword, pack(">I2", address) .. data
    return transact(self, one, pack("B", one.code) .. one.echo)
  end
  one.code, one.echo = FC.wwords, pack(">I2I2", address, #data // 2)
  return transact(self, one, pack("B", one.code) .. one.echo .. pack("s1", data))
end

-- syntax: modbus:readwrite(waddr, value, raddr, len [, vtype] [, unit] [, callback]) -> as rholding       writes first, then reads
function methods:readwrite(waddr, value, raddr, count, ...)
  self_of(self, "readwrite")
  local one = options(self, "readwrite", ...)
  local data = words_of(waddr, value, one.vtype, MAX_VALUES.readwrite, "readwrite")
  count = arg.integer(count, 4, "readwrite")
  local amount = (count * TYPES[one.vtype][1] + 1) // 2
  check_address(raddr, amount, MAX_VALUES.rwords, "readwrite")
  one.code, one.count, one.read, one.bytes = FC.readwrite, count, read_words, 2 * amount
  return transact(self, one, pack(">BI2I2I2I2s1", one.code, raddr, amount, waddr, #data // 2, data))
end

-- syntax: modbus:connected() -> boolean [, the error that closed the connection]
function methods:connected()
  self_of(self, "connected")
  if self.is_open and self.sock:state() ~= "connected" then fail(self, "socketclosed") end
  return self.is_open, self.fault
end

-- syntax: modbus:close() -> true | false when it was closed before
function methods:close()
  self_of(self, "close")
  if not self.is_open then return false end
  self.onclose = nil
  fail(self, "socketclosed")
  return true
end

class.__close = methods.close

-- ---- connections

local function tls_of(op)
  local shark = op.shark or op.secure
  if shark == true then return ba.sharkclient() end
  return shark and (core.tls.check(shark, "shark", "connect", "client") and shark) or nil
end

local function connected(addr, op, timeout_ms)
  if core.type(addr) ~= "string" then return arg.instance(addr, core.socket.class, 1, "connect") end
  local shark = tls_of(op)
  local port = arg.optional(arg.integer, op.port, shark and TLS_PORT or PORT, "port", "connect")
  local sock, word, reason = ba.socket.connect(addr, port, {timeout = timeout_ms, shark = shark, intf = op.intf, ipv6 = op.ipv6})
  if not sock then return nil, word, reason end
  if shark and not op.nocheck then
    local is_trusted, why = sock:trusted(addr)
    if not is_trusted then
      sock:close()
      return nil, "sslnottrusted", why
    end
  end
  return sock
end

local function open(self, addr, op)
  local sock, word, reason = connected(addr, op, self.timeout_ms)
  if not sock then return nil, word, reason end
  self.sock = sock
  return self
end

-- As `open`, but in a new cosocket, which also receives: the activity of the caller continues.
local function open_cosocket(self, addr, op)
  self.timer = ba.timer(function() fail(self, "timeout") end)
  if core.type(addr) ~= "string" then
    open(self, addr, op)
    if not self.sock:event(function() receive(self) end, "s") then return nil, "incorrectuse" end
    return self
  end
  local is_done, client, word, reason
  ba.socket.event(function()
    client, word, reason = open(self, addr, op)
    is_done = true
    if client then receive(self) end
  end)
  while not is_done do core.sleep(1) end
  return client, word, reason
end

-- syntax: connect(addr | socket [, {port=502, timeout=ms, unit=1, async=false, onclose=f(error, modbus), shark=, nocheck=, intf=, ipv6=}])
-- -> modbus | nil, error
local function connect(addr, op)
  op = arg.optional(arg.table, op, {}, 2, "connect")
  local timeout_ms = arg.optional(arg.milliseconds, op.timeout, TIMEOUT_MS, "timeout", "connect")
  local is_async = arg.optional(arg.boolean, op.async, false, "async", "connect")
  local onclose = arg.optional(arg["function"], op.onclose, nil, "onclose", "connect")
  local unit = arg.optional(arg.integer, op.unit, UNIT, "unit", "connect")
  if unit < 0 or unit > 255 then bad_range("unit", "connect", "a unit from 0 to 255", unit) end
  local self = setmetatable({
    timeout_ms = timeout_ms, is_async = is_async, onclose = onclose, unit = unit, is_open = true, is_busy = false, number = 0,
    queue = {}, first = 1, next = 1, received = "", at = 1, unexpected = 0,
  }, class)
  return (is_async and open_cosocket or open)(self, addr, op)
end

return {connect = connect}
