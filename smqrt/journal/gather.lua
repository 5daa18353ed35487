-- Joins the columns of many small batches of a segment (layout: smqrt/journal/columns.py), for LuaJIT.
-- Called as chunk(max_batches, header_bytes, body_at, rows_at, nodes_at, buffers_at, {at, bytes, at, bytes ...}): the
-- positions of the numbers in a batch's header, and the constant bytes between them.
local max_batches, header_bytes, body_at, rows_at, nodes_at, buffers_at, constant = ...
local ffi, bit = require "ffi", require "bit"
local band, bor, lshift, rshift = bit.band, bit.bor, bit.lshift, bit.rshift
ffi.cdef "int memcmp(const void*, const void*, size_t)"
local u8s, i32s, i64s = ffi.typeof "const uint8_t*", ffi.typeof "const int32_t*", ffi.typeof "const int64_t*"
local to_u8, to_i32 = ffi.typeof "uint8_t*", ffi.typeof "int32_t*"

local starts, counts = ffi.new("const uint8_t*[?]", max_batches), ffi.new("int32_t[?]", max_batches)
local bodies, batches, rows = ffi.new("int64_t[?]", max_batches), 0, 0

local function i64(p, at) return tonumber(ffi.cast(i64s, p + at)[0]) end

local function is_batch(p)
  for part = 1, #constant, 2 do
    local text = constant[part + 1]
    if ffi.C.memcmp(p + constant[part], text, #text) ~= 0 then return false end
  end
  return true
end

-- Surveys the batches from `at` on until they have `wanted` rows. Returns the position after them, and the number of rows.
local function survey(address, at, length, wanted)
  local data = ffi.cast(u8s, address)
  batches, rows = 0, 0
  while at < length and rows < wanted and batches < max_batches do
    local p = data + at
    if length - at < header_bytes or not is_batch(p) then error("no batch starts at the expected offset", 0) end
    local count, body = i64(p, rows_at), i64(p, body_at)
    -- The number of rows is an int32, and a column of texts has one more offset than rows.
    if count < 1 or count > 2147483646 or body < 0 or body > length - at - header_bytes then
      error("a batch is longer than the data", 0)
    end
    starts[batches], counts[batches], bodies[batches] = p, count, body
    batches, rows, at = batches + 1, rows + count, at + header_bytes + body
  end
  return at, rows
end

local function buffer_of(batch, buffer, min_size)
  local place = ffi.cast(i64s, starts[batch] + buffers_at) + 2 * buffer
  local at, size = tonumber(place[0]), tonumber(place[1])
  if at < 0 or size < min_size or at + size > tonumber(bodies[batch]) then error("a column is shorter than its rows", 0) end
  return starts[batch] + header_bytes + at
end

local function nulls_of(batch, column) return i64(starts[batch], nodes_at + 16 * column + 8) end

local function nulls(column)
  local found = 0
  for batch = 0, batches - 1 do found = found + nulls_of(batch, column) end
  return found
end

local function join_bits(buffer, address, has_bits)
  local to, row = ffi.cast(to_u8, address), 0
  ffi.fill(to, rshift(rows + 7, 3))
  for batch = 0, batches - 1 do
    local count, is_stored = counts[batch], has_bits(batch)
    local from = is_stored and buffer_of(batch, buffer, rshift(count + 7, 3)) or starts[batch]
    for at = 0, count - 1 do
      if not is_stored or band(rshift(from[rshift(at, 3)], band(at, 7)), 1) == 1 then
        local byte = rshift(row, 3)
        to[byte] = bor(to[byte], lshift(1, band(row, 7)))
      end
      row = row + 1
    end
  end
end

local function bits(column, buffer, address)
  join_bits(buffer, address, function(batch) return nulls_of(batch, column) > 0 end)
end

local function booleans(buffer, address) join_bits(buffer, address, function() return true end) end

local function numbers(buffer, width, address)
  local to = ffi.cast(to_u8, address)
  for batch = 0, batches - 1 do
    local size = counts[batch] * width
    ffi.copy(to, buffer_of(batch, buffer, size), size)
    to = to + size
  end
end

local function ends_of(batch, buffer)
  local count = counts[batch]
  local ends = ffi.cast(i32s, buffer_of(batch, buffer, (count + 1) * 4))
  if ends[0] ~= 0 or ends[count] < 0 then error("the offsets of a text column are invalid", 0) end
  return ends, count
end

local function text_bytes(buffer)
  local total = 0
  for batch = 0, batches - 1 do
    local ends, count = ends_of(batch, buffer)
    total = total + ends[count]
  end
  return total
end

local function texts(buffer, ends_address, data_address)
  local to_ends, to, before, row = ffi.cast(to_i32, ends_address), ffi.cast(to_u8, data_address), 0, 0
  to_ends[0] = 0
  for batch = 0, batches - 1 do
    local ends, count = ends_of(batch, buffer)
    for at = 1, count do
      if ends[at] < ends[at - 1] then error("the offsets of a text column are invalid", 0) end
      to_ends[row + at] = before + ends[at]
    end
    local size = ends[count]
    ffi.copy(to + before, buffer_of(batch, buffer + 1, size), size)
    before, row = before + size, row + count
  end
end

return survey, nulls, bits, booleans, numbers, text_bytes, texts
