-- Converts recorded frames to the columns of a journal batch (layout: smqrt/journal/record.py), for LuaJIT.
-- The Python implementation is in smqrt/journal/columns.py. Called as chunk(rows, text_bytes, payload_bytes, has_mqtt);
-- has_mqtt: whether batches have the columns of MQTT.
local max_rows, text_room, payload_room, has_mqtt = ...
local ffi, bit = require "ffi", require "bit"
local band, bor, bxor, lshift, rshift, tobit = bit.band, bit.bor, bit.bxor, bit.lshift, bit.rshift, bit.tobit
local u32_in, u8_in = ffi.typeof "const uint32_t*", ffi.typeof "const uint8_t*"

local STAMP, TOGGLE, ATTRIBUTES, LARGE, PUBLISH, HEADER = 0, 1, 2, 3, 8, 15
local TOPIC, SUBTOPIC, UID, PROPERTIES, LARGE_MESSAGE = 1, 2, 3, 4, 5
local DIRECT, SERVER = 1, 16
local TWO32 = 4294967296

local function longs() return ffi.new("int64_t[?]", max_rows) end

local function texts(room)
  local bytes = ffi.new("uint8_t[?]", room)
  return {offsets = ffi.new("int32_t[?]", max_rows + 1), bits = ffi.new("uint8_t[?]", max_rows / 8 + 1), data = bytes, at = 0, nulls = 0, room = room}
end

local ts, tids, stids, ptids, flags = longs(), longs(), longs(), longs(), ffi.new("int32_t[?]", max_rows)
local topics, subtopics, uids, payloads = texts(text_room), texts(text_room), texts(text_room), texts(payload_room + 8)
-- 68 bytes a row: five 8-byte numbers, the flags, five offsets of texts, and the bitmaps of nulls. With the columns of
-- MQTT 9 more: a number, an offset, and two bitmaps.
local out_room = max_rows * (has_mqtt and 77 or 68) + (has_mqtt and 4 or 3) * text_room + 4096
local out = ffi.new("uint8_t[?]", out_room)
local o = ffi.cast("uint8_t*", out)
local names = {{}, {}, {}, {}}
local topic_names, subtopic_names, uid_names = names[TOPIC], names[SUBTOPIC], names[UID]
local rows, stamped, toggled, server = 0, 0, 0, -1
-- Of the messages of MQTT clients. Rows of other messages are zeros in the arrays, so that they need no work: `filled` is
-- the row up to which the offsets of properties are set.
local mqtt, filled = has_mqtt and texts(text_room), 0
local qos = has_mqtt and ffi.new("int32_t[?]", max_rows)
local retained = has_mqtt and ffi.new("uint8_t[?]", max_rows / 8 + 1)
local now_qos, now_retain, now_properties = 0, 0, false -- of the messages to come
local ts_min, ts_max = 0, 0

local function u16(p, at) return bor(lshift(p[at], 8), p[at + 1]) end
local function u32(p, at) return ((p[at] * 256 + p[at + 1]) * 256 + p[at + 2]) * 256 + p[at + 3] end

local function stamp(p, at)
  local now = u32(p, at + 3) * TWO32 + u32(p, at + 7)
  for row = stamped, rows - 1 do ts[row] = now end
  if stamped < rows then
    if stamped == 0 then ts_min, ts_max = now, now end
    if now < ts_min then ts_min = now end
    if now > ts_max then ts_max = now end
  end
  stamped = rows
end

-- Stamps a full batch with the time of its turn, which is later in the data.
local function stamp_ahead(p, at, n)
  while at < n and p[at + 2] ~= STAMP do at = at + p[at] * 256 + p[at + 1] end
  if at < n then stamp(p, at) end
end

-- Marks that a row has a name. The bitmap is used only if some row has no name.
local function mark(column, row)
  local byte = rshift(row, 3)
  column.bits[byte] = bor(column.bits[byte], lshift(1, band(row, 7)))
end

local function mark_none(column, row)
  if column.nulls == 0 then
    ffi.fill(column.bits, rshift(max_rows, 3) + 1)
    ffi.fill(column.bits, rshift(row, 3), 255)
    column.bits[rshift(row, 3)] = lshift(1, band(row, 7)) - 1
  end
  column.nulls = column.nulls + 1
end

local function put(column, row, name)
  local at = column.at
  if name then
    ffi.copy(column.data + at, name, #name)
    at = at + #name
    column.at = at
    if column.nulls > 0 then mark(column, row) end
  else
    mark_none(column, row)
  end
  column.offsets[row + 1] = at
end

-- Sets the same name in the rows from `first` up to `last`.
local function put_all(column, first, last, name)
  local data, at, size = column.data + column.at, column.at, name and #name or 0
  local filled, all = size, size * (last - first + 1)
  if size > 0 then
    ffi.copy(data, name, size)
    while filled < all do
      local more = math.min(filled, all - filled)
      ffi.copy(data + filled, data, more)
      filled = filled + more
    end
  end
  local offsets = column.offsets
  for row = first, last do
    at = at + size
    offsets[row + 1] = at
  end
  column.at = at
  if not name then
    for row = first, last do mark_none(column, row) end
  elseif column.nulls > 0 then
    for row = first, last do mark(column, row) end
  end
end

local function set_bit(bits, row)
  local byte = rshift(row, 3)
  bits[byte] = bor(bits[byte], lshift(1, band(row, 7)))
end

-- Sets the columns of MQTT in the rows from `first` up to `last`.
local function put_mqtt(first, last)
  local offsets, at, size = mqtt.offsets, mqtt.at, #now_properties
  for row = filled, first - 1 do offsets[row + 1] = at end
  for row = first, last do
    ffi.copy(mqtt.data + at, now_properties, size)
    at = at + size
    offsets[row + 1] = at
    qos[row] = now_qos
    set_bit(mqtt.bits, row)
    if now_retain ~= 0 then set_bit(retained, row) end
  end
  mqtt.at, mqtt.nulls, filled = at, mqtt.nulls + last - first + 1, last + 1
end

local function fits(name, column) return not name or column.at + #name <= column.room end

-- Returns how many more rows with this name fit.
local function room_for(name, column)
  if not name or name == "" then return max_rows end
  return math.floor((column.room - column.at) / #name)
end

-- Returns whether a frame is a message of the same publisher to the same topic.
local function is_alike(frame, other)
  if other[2] ~= PUBLISH then return false end
  local a, b = ffi.cast(u32_in, frame + 3), ffi.cast(u32_in, other + 3)
  return a[0] == b[0] and a[1] == b[1] and a[2] == b[2]
end

-- Appends the payloads of a frame and of the similar frames after it, up to a row. Returns the position after them. Bit
-- operations keep the sums whole numbers: LuaJIT would compute them as floats, which takes 1.5 times as long.
local function append_payloads(p, at, n, last)
  local first, row, filled = p + at, rows, payloads.at
  local data, offsets = payloads.data, payloads.offsets
  repeat
    local length = u16(p, at)
    local size = length - HEADER
    if filled + size > payload_room then break end
    ffi.copy(data + filled, p + at + HEADER, size)
    filled = tobit(filled + size)
    row = row + 1
    offsets[row] = filled
    at = tobit(at + length)
  until row > last or at >= n or not is_alike(first, p + at)
  payloads.at, rows = filled, row
  return at
end

-- Appends the frames of the `n` bytes at an address from `at` on. Returns the position after them, and the kind and
-- number of a missing name.
local function append(address, n, at)
  local p = ffi.cast(u8_in, address)
  while at < n do
    local length, kind = p[at] * 256 + p[at + 1], p[at + 2]
    if kind == PUBLISH then
      local tid, ptid, stid = u32(p, at + 3), u32(p, at + 7), u32(p, at + 11)
      local topic, uid, subtopic = topic_names[tid], uid_names[ptid], false
      if topic == nil then return at, TOPIC, tid end
      if uid == nil then return at, UID, ptid end
      if stid ~= 0 then
        subtopic = subtopic_names[stid]
        if subtopic == nil then return at, SUBTOPIC, stid end
      end
      local size = length - HEADER
      if rows == max_rows or payloads.at + size > payload_room
        or not (fits(topic, topics) and fits(uid, uids) and fits(subtopic, subtopics))
        or (now_properties and not fits(now_properties, mqtt)) then
        stamp_ahead(p, at, n)
        return at, 0, 0
      end
      local flag = toggled
      if not topic then flag = bor(flag, DIRECT) end
      if ptid == server then flag = bor(flag, SERVER) end
      local first, next = rows, at + length
      if next < n and is_alike(p + at, p + next) then -- in bulk: half the time of single frames
        local count = math.min(max_rows - rows, room_for(topic, topics), room_for(uid, uids), room_for(subtopic, subtopics))
        if now_properties then count = math.min(count, room_for(now_properties, mqtt)) end
        at = append_payloads(p, at, n, first + count - 1)
        put_all(topics, first, rows - 1, topic)
        put_all(uids, first, rows - 1, uid)
        put_all(subtopics, first, rows - 1, subtopic)
        for row = first, rows - 1 do
          tids[row], stids[row], ptids[row], flags[row] = tid, stid, ptid, flag
        end
      else
        put(topics, rows, topic)
        put(uids, rows, uid)
        put(subtopics, rows, subtopic)
        tids[rows], stids[rows], ptids[rows], flags[rows] = tid, stid, ptid, flag
        ffi.copy(payloads.data + payloads.at, p + at + HEADER, size)
        payloads.at = payloads.at + size
        payloads.offsets[rows + 1] = payloads.at
        rows = rows + 1
        at = next
      end
      if now_properties then put_mqtt(first, rows - 1) end
    else
      if kind == STAMP then
        stamp(p, at)
      elseif kind == TOGGLE then
        toggled = bxor(toggled, p[at + 3])
      elseif kind == ATTRIBUTES then
        local number = u32(p, at + 5)
        local properties = names[PROPERTIES][number]
        if number == 0 then properties = false end
        if properties == nil then return at, PROPERTIES, number end
        now_qos, now_retain, now_properties = p[at + 3], p[at + 4], properties
      elseif kind == LARGE then
        return at, LARGE_MESSAGE, 0
      end
      at = at + length
    end
  end
  return at, 0, 0
end

local to = 0

local function piece(from, size)
  ffi.copy(o + to, from, size)
  to = to + size
  local pad = band(-size, 7)
  ffi.fill(o + to, pad)
  to = to + pad
end

-- The payloads, more than half of a batch, are written without a copy.
local function pad_payloads()
  local pad = band(-payloads.at, 7)
  ffi.fill(payloads.data + payloads.at, pad)
  return payloads.at + pad
end

local function text_pieces(column)
  local bits = rshift(rows + 7, 3)
  if column.nulls > 0 then piece(column.bits, bits) end
  piece(column.offsets, (rows + 1) * 4)
  piece(column.data, column.at)
  local size, nulls = column.at, column.nulls
  column.at, column.nulls = 0, 0
  return size, nulls
end

-- Writes the columns of MQTT, if they have values. Returns the bytes of the properties, and the number of nulls.
local function mqtt_pieces()
  if not has_mqtt or mqtt.nulls == 0 then return 0, rows end
  for row = filled, rows - 1 do mqtt.offsets[row + 1] = mqtt.at end
  local bits, nulls, size = rshift(rows + 7, 3), rows - mqtt.nulls, mqtt.at
  piece(mqtt.bits, bits)
  piece(qos, rows * 4)
  piece(retained, bits)
  piece(mqtt.offsets, (rows + 1) * 4)
  piece(mqtt.data, size)
  ffi.fill(mqtt.bits, bits)
  ffi.fill(qos, rows * 4)
  ffi.fill(retained, bits)
  mqtt.at, mqtt.nulls, filled = 0, 0, 0
  return size, nulls
end

local function numbers(from) piece(from, rows * 8) end

local function count_up(seq)
  local column = ffi.cast("int64_t*", o + to)
  for row = 0, rows - 1 do column[row] = seq + row end
  to = to + rows * 8
end

-- Writes the appended rows to `out` as the body of an Arrow record batch, and resets the state. Returns the number of
-- rows, the bytes before, of and after the payloads (those before and after are adjacent in `out`), and more sizes.
local function take(seq)
  to = 0
  count_up(seq)
  numbers(ts)
  local topic_bytes, topic_nulls = text_pieces(topics)
  numbers(tids)
  local subtopic_bytes, subtopic_nulls = text_pieces(subtopics)
  numbers(stids)
  numbers(ptids)
  local uid_bytes, uid_nulls = text_pieces(uids)
  piece(flags, rows * 4)
  piece(payloads.offsets, (rows + 1) * 4)
  local before, padded = to, pad_payloads()
  -- txn: all null
  local bits, offsets = rshift(rows + 7, 3), (rows + 1) * 4
  local room = bits + band(-bits, 7) + offsets + band(-offsets, 7)
  ffi.fill(o + to, room)
  to = to + room
  local properties_bytes, mqtt_nulls = mqtt_pieces()
  local count, payload_bytes = rows, payloads.at
  rows, stamped, payloads.at = 0, 0, 0
  return count, before, padded, to - before, ts_min, ts_max, topic_nulls, subtopic_nulls, uid_nulls, topic_bytes, subtopic_bytes, uid_bytes, payload_bytes, mqtt_nulls, properties_bytes
end

local function name(kind, number, text) names[kind][number] = text or false end
local function forget(kind, number) names[kind][number] = nil end
local function set_server(number) server = number end
local function address(array) return tonumber(ffi.cast("uintptr_t", array)) end

return append, take, name, forget, set_server, address(out), out_room, address(payloads.data), payload_room + 8, function() return out, payloads end
