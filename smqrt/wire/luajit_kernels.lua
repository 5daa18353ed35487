-- The kernels of wire/kernels.py for LuaJIT: functions over one buffer, without other state.
-- Called as chunk(size). Returns the functions, the addresses of the arrays for Python, and a reference to the arrays.
local size = ...
local ffi, bit = require "ffi", require "bit"
local band, bxor, rshift = bit.band, bit.bxor, bit.rshift
local u32_in, u32_out, u8_in = ffi.typeof "const uint32_t*", ffi.typeof "uint32_t*", ffi.typeof "const uint8_t*"

local PUBLISH, PUBLISH_HEADER = 8, 15
local ENCODE_ROOM = 96 * 1024

local buffer, batch_ends = ffi.new("uint8_t[?]", size), ffi.new("uint32_t[?]", size / 3 + 1)
local encoded = ffi.new("uint8_t[?]", ENCODE_ROOM)
local batch_frames = ffi.new("uint32_t[?]", size / 3 + 1)
local p, ends = ffi.cast("uint8_t*", buffer), ffi.cast("uint32_t*", batch_ends)

local function scan(n, start)
  local at, batches = start, 0
  while n - at >= 2 do
    local length = p[at] * 256 + p[at + 1]
    if length < 3 then return batches, at, true end
    if n - at == 2 then break end
    local frames = 1
    if p[at + 2] == PUBLISH then
      if length < PUBLISH_HEADER then return batches, at, true end
      if at + length > n then break end
      local key = ffi.cast(u32_in, p + at + 3)
      local tid, ptid = key[0], key[1]
      at = at + length
      while n - at >= PUBLISH_HEADER do
        key = ffi.cast(u32_in, p + at + 3)
        length = p[at] * 256 + p[at + 1]
        if p[at + 2] ~= PUBLISH or key[0] ~= tid or key[1] ~= ptid
          or length < PUBLISH_HEADER or at + length > n then break end
        at, frames = at + length, frames + 1
      end
    else
      if at + length > n then break end
      at = at + length
    end
    ends[batches], batch_frames[batches] = at, frames
    batches = batches + 1
  end
  return batches, at, false
end

-- Forward copy is safe in place: a raw frame is at least four bytes shorter than its masked WebSocket form.
local function unmask(n)
  local at, to = 0, 0
  while n - at >= 6 and p[at] == 0x82 do
    local length, head = band(p[at + 1], 127), 6
    if p[at + 1] < 128 or length == 127 or length == 0 then break end
    if length == 126 then
      if n - at < 8 then break end
      length, head = p[at + 2] * 256 + p[at + 3], 8
      if length < 126 then break end
    end
    if at + head + length > n or length + 2 > 0xFFFF then break end
    local k0, k1, k2 = p[at + head - 4], p[at + head - 3], p[at + head - 2]
    local key = ffi.cast(u32_in, p + at + head - 4)[0]
    local from, into = ffi.cast(u32_in, p + at + head), ffi.cast(u32_out, p + to + 2)
    local words = rshift(length, 2)
    local tail = words * 4
    p[to] = rshift(length + 2, 8)
    p[to + 1] = band(length + 2, 255)
    for i = 0, words - 1 do into[i] = bxor(from[i], key) end
    if length > tail then p[to + 2 + tail] = bxor(p[at + head + tail], k0) end
    if length > tail + 1 then p[to + 3 + tail] = bxor(p[at + head + tail + 1], k1) end
    if length > tail + 2 then p[to + 4 + tail] = bxor(p[at + head + tail + 2], k2) end
    to, at = to + 2 + length, at + head + length
  end
  return to, at
end

local function encode(run)
  local from, n = ffi.cast(u8_in, run), #run
  local at, to = 0, 0
  while n - at >= 2 do
    local length = from[at] * 256 + from[at + 1]
    if at + length > n then break end
    local body = length - 2
    encoded[to] = 0x82
    if body < 126 then
      encoded[to + 1] = body
      to = to + 2
    else
      encoded[to + 1] = 126
      encoded[to + 2] = rshift(body, 8)
      encoded[to + 3] = band(body, 255)
      to = to + 4
    end
    ffi.copy(encoded + to, from + at + 2, body)
    to, at = to + body, at + length
  end
  return ffi.string(encoded, to), at
end

local function count(address, n)
  local run, at, frames, longest = ffi.cast(u8_in, address), 0, 0, 0
  while at < n do
    local length = run[at] * 256 + run[at + 1]
    if length > longest then longest = length end
    at = at + length
    frames = frames + 1
  end
  return frames, longest
end

-- A partition has the frames of a chunk for one subscriber. `keys` are the ids of destinations, `numbers` the partition of
-- each: u32.
local function partition_table(keys, numbers)
  local table = {count = 0}
  local ids, partition_of = ffi.cast(u32_in, keys), ffi.cast(u32_in, numbers)
  for i = 0, #keys / 4 - 1 do
    local partition = partition_of[i]
    table[ids[i]] = partition
    if partition >= table.count then table.count = partition + 1 end
  end
  return table
end

local max_partitions = 1024
local frame_partition = ffi.new("uint16_t[?]", size / PUBLISH_HEADER + 1)
local partition_bytes, partition_at = ffi.new("uint32_t[?]", max_partitions), ffi.new("uint32_t[?]", max_partitions)
local partitioned, partition_ids, partition_ends =
  ffi.new("uint8_t[?]", size), ffi.new("uint32_t[?]", max_partitions), ffi.new("uint32_t[?]", max_partitions)

local function measure(n, table, publisher)
  local at, frames = 0, 0
  while n - at >= PUBLISH_HEADER do
    local length = p[at] * 256 + p[at + 1]
    local key = ffi.cast(u32_in, p + at + 3)
    if p[at + 2] ~= PUBLISH or length < PUBLISH_HEADER or at + length > n or key[1] ~= publisher then break end
    local partition = table[key[0]]
    if not partition then break end
    frame_partition[frames] = partition
    partition_bytes[partition] = partition_bytes[partition] + length
    frames, at = frames + 1, at + length
  end
  return frames, at
end

local function partition(n, table, publisher)
  local frames, used = measure(n, table, publisher)
  local to, count = 0, 0
  for partition = 0, table.count - 1 do
    local bytes = partition_bytes[partition]
    if bytes > 0 then
      partition_at[partition], partition_bytes[partition] = to, 0
      to = to + bytes
      partition_ids[count], partition_ends[count] = partition, to
      count = count + 1
    end
  end
  local at = 0
  for frame = 0, frames - 1 do
    local partition, length = frame_partition[frame], p[at] * 256 + p[at + 1]
    ffi.copy(partitioned + partition_at[partition], p + at, length)
    partition_at[partition] = partition_at[partition] + length
    at = at + length
  end
  return count, used, frames
end

-- MQTT: PUBLISH packets become frames, and frames become packets with QoS 0.

ffi.cdef "int memcmp(const void*, const void*, size_t);"
local same_bytes = ffi.C.memcmp
local MAX_PAYLOAD = 0xFFF0
local PACKETS_ROOM = 256 * 1024
local packets = ffi.new("uint8_t[?]", PACKETS_ROOM)
local MAX_NUMBERS = 100
local packet_numbers = ffi.new("uint8_t[?]", 2 * MAX_NUMBERS)

local function publishes(start, n, name_size, block, destination, publisher)
  local first, number_size, most = p[start], 0, n
  if first ~= 0x30 then number_size, most = 2, MAX_NUMBERS end
  local at, to, count, fixed, name = start, 0, 0, 2 + name_size + number_size + block, nil
  local tid, ptid = bit.bswap(bit.tobit(destination)), bit.bswap(bit.tobit(publisher))
  while n - at >= 2 and p[at] == first and count < most do
    local length, body = p[at + 1], at + 2
    if length > 127 then
      if n - at < 4 then break end
      length, body = length - 128 + p[at + 2] * 128, at + 3
      if p[at + 2] > 127 then
        length, body = length - 16384 + p[at + 3] * 16384, at + 4
        if p[at + 3] > 127 then break end
      end
    end
    local payload = length - fixed
    if payload < 0 or payload > MAX_PAYLOAD or body + length > n or to + payload + PUBLISH_HEADER > size
      or p[body] * 256 + p[body + 1] ~= name_size or (block == 1 and p[body + fixed - 1] ~= 0) then break end
    if name == nil then name = p + body + 2 elseif same_bytes(name, p + body + 2, name_size) ~= 0 then break end
    if number_size == 2 then
      local high, low = p[body + 2 + name_size], p[body + 3 + name_size]
      if high == 0 and low == 0 then break end
      packet_numbers[2 * count], packet_numbers[2 * count + 1] = high, low
    end
    local length = payload + PUBLISH_HEADER
    local into = ffi.cast(u32_out, partitioned + to + 3)
    partitioned[to], partitioned[to + 1], partitioned[to + 2] = rshift(length, 8), band(length, 255), PUBLISH
    into[0], into[1], into[2] = tid, ptid, 0
    ffi.copy(partitioned + to + PUBLISH_HEADER, p + body + fixed, payload)
    at, to, count = body + payload + fixed, to + length, count + 1
  end
  return count, at, to
end

local function packed(run, first, fixed)
  local from, n, fixed_bytes, fixed_size = ffi.cast(u8_in, run), #run, ffi.cast(u8_in, fixed), #fixed
  local at, to = 0, 0
  while n - at >= PUBLISH_HEADER do
    local length = from[at] * 256 + from[at + 1]
    local payload = length - PUBLISH_HEADER
    local body = payload + fixed_size
    if at + length > n or to + body + 5 > PACKETS_ROOM then break end
    packets[to] = first
    to = to + 1
    local rest = body
    while rest > 127 do
      packets[to] = band(rest, 127) + 128
      to, rest = to + 1, rshift(rest, 7)
    end
    packets[to] = rest
    ffi.copy(packets + to + 1, fixed_bytes, fixed_size)
    ffi.copy(packets + to + 1 + fixed_size, from + at + PUBLISH_HEADER, payload)
    to, at = to + 1 + body, at + length
  end
  return ffi.string(packets, to), at
end

local function address(array) return tonumber(ffi.cast("uintptr_t", array)) end

return scan, unmask, encode, partition_table, partition, count, publishes, packed,
  address(buffer), address(batch_ends), address(batch_frames), address(partitioned), address(partition_ids),
  address(partition_ends), address(packet_numbers), function()
    return buffer, batch_ends, batch_frames, encoded, partitioned, partition_ids, partition_ends, packets, packet_numbers
  end
