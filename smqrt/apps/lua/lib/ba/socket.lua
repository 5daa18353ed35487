-- Numbers in network byte order (spec: bas-api §8.1).
local core = ...

local arg, pack, raise, unpack = core.arg, string.pack, core.raise, string.unpack

local UNSIGNED, FLOAT <const> = {}, {[4] = ">f", [8] = ">d"}
for size = 1, 8 do UNSIGNED[size] = ">I" .. size end

ba.socket = ba.socket or {}

local function format_of(formats, size, fname, expected)
  size = arg.integer(size, 1, fname)
  return formats[size] or core.broken_rule(1, fname, expected .. " expected"), size
end

local function read(formats, size, text, position, fname, expected)
  local format
  format, size = format_of(formats, size, fname, expected)
  text = arg.string(text, 2, fname)
  position = arg.optional(arg.integer, position, 1, 3, fname)
  if position < 1 or position > #text - size + 1 then raise("bad argument #3 to '" .. fname .. "' (position out of range)") end
  return (unpack(format, text, position))
end

--- ba.socket.h2n(size, n): returns n as 1 to 8 bytes, the most significant first. Higher bytes are dropped: negative numbers wrap.
function ba.socket.h2n(size, n)
  local format
  format, size = format_of(UNSIGNED, size, "h2n", "1 to 8")
  n = arg.integer(n, 2, "h2n")
  return pack(format, size < 8 and n & ((1 << 8 * size) - 1) or n)
end

--- ba.socket.n2h(size, s [,position]): the inverse. Raises when s is too short.
function ba.socket.n2h(size, text, position)
  return read(UNSIGNED, size, text, position, "n2h", "1 to 8")
end

--- ba.socket.fh2n(size, n): returns n as a float of 4 or 8 bytes.
function ba.socket.fh2n(size, n)
  return pack((format_of(FLOAT, size, "fh2n", "4 or 8")), arg.number(n, 2, "fh2n"))
end

--- ba.socket.fn2h(size, s [,position]): the inverse.
function ba.socket.fn2h(size, text, position)
  return read(FLOAT, size, text, position, "fn2h", "4 or 8")
end
