-- ba.bytearray: mutable bytes (spec: bas-api §8.4).
--
-- A byte array is a string until its first change, which converts it to a table of bytes. Positions are 1-based and relative
-- to the window, initially the whole array. Those of setsize, which sets the window, are relative to the whole array.
local core = ...

local arg, byte, char, concat, getmetatable, min, rep, setmetatable, sub, type, unpack =
  core.arg, string.byte, string.char, table.concat, core.getmetatable, math.min, string.rep, setmetatable, string.sub, core.rawtype, table.unpack
local pack, raise, format, unpack_number = string.pack, core.raise, string.format, string.unpack

local CHUNK <const> = 4096 -- values on the Lua stack at a time
local MAX_BYTES <const> = 64 * 1024 * 1024

-- Fields: text (a string) or bytes (a table), size, first and last of the window.
local class = core.class("bytearray", nil)
local library = {}

local function make(text)
  return setmetatable({text = text, bytes = false, size = #text, first = 1, last = #text}, class)
end

local function is_bytearray(value)
  return type(value) == "table" and getmetatable(value) == class
end

-- Returns the table of bytes, converted from the string when needed.
local function to_table(self)
  local bytes = self.bytes
  if bytes then return bytes end
  local text = self.text
  bytes = {byte(text, 1, CHUNK)}
  for at = CHUNK + 1, #text, CHUNK do
    local part = {byte(text, at, at + CHUNK - 1)}
    table.move(part, 1, #part, at, bytes)
  end
  self.bytes, self.text = bytes, false
  return bytes
end

-- Returns bytes i to j of the whole array as a string.
local function slice(self, i, j)
  local text = self.text
  if text then return sub(text, i, j) end
  local bytes = self.bytes
  if j - i < CHUNK then return char(unpack(bytes, i, j)) end
  local parts = {}
  for at = i, j, CHUNK do parts[#parts + 1] = char(unpack(bytes, at, min(at + CHUNK - 1, j))) end
  return concat(parts)
end

local function out_of_range(what, position, size)
  raise(format("bytearray: %s %s is out of range (1 to %d)", what, position, size))
end

-- Returns i and j, by default 1 and `size`, after checking them. A negative j counts from the end, as in string.sub.
local function range(i, j, size, fname)
  i, j = arg.optional(arg.integer, i, 1, 2, fname), arg.optional(arg.integer, j, size, 3, fname)
  if j < 0 then j = j + size + 1 end
  if i < 1 or i > size + 1 then out_of_range("position", i, size) end
  if j > size or j < i - 1 then out_of_range("end", j, size) end
  return i, j
end

local function self_of(value, fname)
  return arg.instance(value, class, 1, fname)
end

-- Returns a value that may be copied into a byte array as a string.
local function source(value, index, fname)
  local kind = type(value)
  if kind == "string" then return value end
  if kind == "number" then return tostring(value) end
  if is_bytearray(value) then return slice(value, value.first, value.last) end
  if kind ~= "table" then core.bad_argument(index, fname, "string, table or bytearray", value) end
  local parts = {}
  for at = 1, #value, CHUNK do parts[#parts + 1] = char(unpack(value, at, min(at + CHUNK - 1, #value))) end
  return concat(parts)
end

-- Writes a string at a position of the whole array, where it must fit.
local function put(self, at, text)
  local bytes = to_table(self)
  for i = 1, #text, CHUNK do
    local part = {byte(text, i, i + CHUNK - 1)}
    table.move(part, 1, #part, at + i - 1, bytes)
  end
end

class.__index = function(self, i)
  local at = type(i) == "number" and math.tointeger(i)
  if not at then return nil end
  at = at + self.first - 1
  if at < self.first or at > self.last then out_of_range("index", i, self.last - self.first + 1) end
  local bytes = self.bytes
  if bytes then return bytes[at] end
  return byte(self.text, at)
end

class.__newindex = function(self, i, value)
  local size = self.last - self.first + 1
  local at = arg.integer(i, 1, "bytearray")
  if at < 1 or at > size then out_of_range("index", i, size) end
  if type(value) == "number" then
    local number = arg.integer(value, 2, "bytearray")
    if number < 0 or number > 255 then out_of_range("a byte of", value, 255) end
    to_table(self)[at + self.first - 1] = number
    return
  end
  local text = source(value, 2, "bytearray")
  if at + #text - 1 > size then out_of_range("the end", at + #text - 1, size) end
  put(self, at + self.first - 1, text)
end

class.__len = function(self) return self.last - self.first + 1 end
class.__tostring = function(self) return slice(self, self.first, self.last) end
class.__eq = function(a, b) return is_bytearray(a) and is_bytearray(b) and tostring(a) == tostring(b) end

--- ba.bytearray.create(size | string): returns a byte array of zeros, or of the bytes of the string.
function library.create(value)
  if type(value) == "string" then return make(value) end
  local size = arg.integer(value, 1, "create")
  if size < 0 or size > MAX_BYTES then out_of_range("size", size, MAX_BYTES) end
  return make(rep("\0", size))
end

--- ba.bytearray.tostring(b [,i [,j]]): returns the bytes i to j as a string.
function library.tostring(b, i, j)
  local self = self_of(b, "tostring")
  i, j = range(i, j, #self, "tostring")
  return slice(self, self.first + i - 1, self.first + j - 1)
end

--- ba.bytearray.size(b): returns the size of the whole array, and the first and last position of the window.
function library.size(b)
  local self = self_of(b, "size")
  return self.size, self.first, self.last
end

--- ba.bytearray.setsize(b [,i [,j]]): sets the window to i to j of the whole array, and returns b.
function library.setsize(b, i, j)
  local self = self_of(b, "setsize")
  self.first, self.last = range(i, j, self.size, "setsize")
  return b
end

--- ba.bytearray.copy(b, position, source [,i [,j]]): copies i to j of the source; returns the number of bytes that did not fit.
function library.copy(b, position, value, i, j)
  local self = self_of(b, "copy")
  local at, text = arg.integer(position, 2, "copy"), source(value, 3, "copy")
  if at < 1 or at > #self + 1 then out_of_range("position", at, #self) end
  i, j = range(i, j, #text, "copy")
  local count = min(j - i + 1, #self - at + 1)
  put(self, self.first + at - 1, sub(text, i, i + count - 1))
  return j - i + 1 - count
end

local UNSIGNED <const> = {}
for size = 1, 8 do UNSIGNED[size] = ">I" .. size end

local function field(b, position, size, fname)
  local self = self_of(b, fname)
  local at = arg.integer(position, 2, fname)
  size = arg.integer(size, 3, fname)
  local form = UNSIGNED[size]
  if not form then raise("bad argument #3 to '" .. fname .. "' (1 to 8 expected)") end
  if at < 1 or at > #self - size + 1 then out_of_range("position", at, #self - size + 1) end
  return self, self.first + at - 1, form, size
end

--- ba.bytearray.h2n(b, position, size, n): writes n as 1 to 8 bytes, the most significant first.
function library.h2n(b, position, size, n)
  local self, at, form
  self, at, form, size = field(b, position, size, "h2n")
  n = arg.integer(n, 4, "h2n")
  put(self, at, pack(form, size < 8 and n & ((1 << 8 * size) - 1) or n))
end

--- ba.bytearray.n2h(b, position, size): returns the number: the inverse.
function library.n2h(b, position, size)
  local self, at, form
  self, at, form, size = field(b, position, size, "n2h")
  if self.text then return (unpack_number(form, self.text, at)) end
  return (unpack_number(form, slice(self, at, at + size - 1)))
end

ba.bytearray = library

--- Whether a value is a byte array: for functions that also accept strings.
core.is_bytearray = is_bytearray
