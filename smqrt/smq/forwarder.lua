-- Forwards single messages between clients (smq/forwarder.py): receive, look up, send, in one call for all sockets.
-- The first of several sockets, frames and subscribers is handled before the loop over the others: LuaJIT can't compile
-- a loop that usually has one pass, nor the code around it.
-- Called as chunk(sockets, buckets, most_segments, loop). Returns the functions, the descriptors of the epoll set and of
-- the timer, the addresses of the arrays for Python, and a reference to other memory.
local sockets, buckets, most_segments, loop = ...
local ffi, bit = require "ffi", require "bit"
local band, bxor, rshift = bit.band, bit.bxor, bit.rshift

-- Linux packs this structure on x86-64 only. Its last member is a number of 64 bits; a descriptor fits into the first 32.
if ffi.arch == "x64" then
  ffi.cdef "typedef struct __attribute__((packed)) { uint32_t events; int32_t fd; uint32_t unused; } smqrt_epoll_event;"
else
  ffi.cdef "typedef struct { uint32_t events; uint32_t padding; int32_t fd; uint32_t unused; } smqrt_epoll_event;"
end
ffi.cdef[[
typedef struct { int64_t tv_sec, tv_nsec; } smqrt_timespec;
typedef struct { uint32_t publisher, tid, subscriber, generation, counter, recorder; } smqrt_route;
typedef struct { double messages, bytes; } smqrt_count;
int epoll_create1(int flags);
int epoll_ctl(int epfd, int op, int fd, smqrt_epoll_event *event);
int epoll_wait(int epfd, smqrt_epoll_event *events, int maxevents, int timeout);
ssize_t recv(int fd, void *buffer, size_t length, int flags);
ssize_t send(int fd, const void *buffer, size_t length, int flags);
int clock_gettime(int clock, smqrt_timespec *time);
typedef struct { smqrt_timespec interval, value; } smqrt_itimerspec;
int timerfd_create(int clock, int flags);
int timerfd_settime(int fd, int flags, const smqrt_itimerspec *new_value, void *old_value);
ssize_t read(int fd, void *buffer, size_t length);
void *calloc(size_t count, size_t size);
void free(void *memory);
]]
local C = ffi.C

local PUBLISH, PUBLISH_HEADER = 8, 15
local EPOLLIN, EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CLOEXEC = 1, 1, 2, 0x80000
local MSG_DONTWAIT, MSG_NOSIGNAL = 0x40, 0x4000
local EINTR, EAGAIN = 4, 11
local CLOCK_MONOTONIC, TFD_NONBLOCK_CLOEXEC = 1, 0x80800
local RECEIVE, ROOM, EVENTS, WAYS = 16384, 256 * 1024, 256, 4  -- ROOM and EVENTS bound the time of a turn
local FREQUENT_S = 0.0005

-- calloc, because the kernel gives memory to the touched part only; ffi.new would write zeros to all of it.
local function array(kind, count)
  return ffi.gc(ffi.cast(ffi.typeof("$*", ffi.typeof(kind)), C.calloc(count, ffi.sizeof(kind))), C.free)
end
-- Received data; then the same without WebSocket framing; then messages that were encoded or gathered for subscribers.
local DECODED, ENCODED = ROOM, 2 * ROOM
local p = array("uint8_t", 6 * ROOM)
local websockets = array("uint8_t", sockets)  -- whether a descriptor is a WebSocket
local u32_in, u32_out = ffi.typeof "const uint32_t*", ffi.typeof "uint32_t*"
local etids, generations = array("uint32_t", sockets), array("uint32_t", sockets)
local routes = array("smqrt_route", buckets * WAYS)
local counts = array("smqrt_count", buckets * WAYS)
local first, last = array("uint32_t", sockets), array("uint32_t", sockets)  -- segments by subscriber; 0 for none
local starts, ends = array("uint32_t", most_segments + 1), array("uint32_t", most_segments + 1)
local following = array("uint32_t", most_segments + 1)
local subscribers = array("uint32_t", most_segments + 1)
local recorded = array("uint8_t", 2 * ROOM)  -- messages for journals
local recorders, record_ends = array("uint32_t", 2 * most_segments), array("uint32_t", 2 * most_segments)
local handed = array("uint32_t", EVENTS * 3)   -- descriptor, start, bytes; without bytes, start is the error number
local unsent = array("uint32_t", most_segments * 4)  -- descriptor, start, bytes, sent bytes or error number + 2^31
local events, outer = ffi.new("smqrt_epoll_event[?]", EVENTS), ffi.new("smqrt_epoll_event[2]")
local event, time = ffi.new "smqrt_epoll_event", ffi.new "smqrt_timespec"

local epoll = C.epoll_create1(EPOLL_CLOEXEC)
local timer = C.timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK_CLOEXEC)
local stay, expirations, armed_ns = ffi.new "smqrt_itimerspec", ffi.new "uint64_t[1]", 0
local begin = 0  -- the place of the first socket of the next turn among the ready ones
local decoded, encoded = 0, 0  -- the ends of these parts
local used, segments, touched, to_hand, to_queue, recorded_bytes, to_record = 0, 0, 0, 0, 0, 0, 0
local last_s = 0

local function now()
  C.clock_gettime(CLOCK_MONOTONIC, time)
  return tonumber(time.tv_sec) + tonumber(time.tv_nsec) * 1e-9
end

-- Index of the first route of the bucket. TIDs are random, descriptors are consecutive.
local function bucket(fd, tid)
  return band(bxor(tid, rshift(tid, 15), fd * 7), buckets - 1) * WAYS
end

local function find(fd, tid)
  local at = bucket(fd, tid)
  if routes[at].publisher == fd and routes[at].tid == tid then return at end
  if routes[at + 1].publisher == fd and routes[at + 1].tid == tid then return at + 1 end
  if routes[at + 2].publisher == fd and routes[at + 2].tid == tid then return at + 2 end
  if routes[at + 3].publisher == fd and routes[at + 3].tid == tid then return at + 3 end
  return -1
end

-- tid as in a frame, read as a number of this machine; recorder 0 for none. Returns false if the bucket is full.
local function add(fd, tid, subscriber, is_websocket, counter, recorder)
  local at = bucket(fd, tid)
  websockets[subscriber] = is_websocket
  for way = at, at + WAYS - 1 do
    if routes[way].publisher == 0 then
      local route = routes[way]
      route.publisher, route.tid, route.subscriber = fd, tid, subscriber
      route.generation, route.counter = generations[subscriber], counter
      route.recorder = recorder
      return true
    end
  end
  return false
end

local function remove(fd, tid)
  local way = find(fd, tid)
  if way >= 0 then routes[way].publisher = 0 end
end

local function join(fd, etid, is_websocket)
  etids[fd], websockets[fd] = etid, is_websocket
  event.events, event.fd = EPOLLIN, fd
  return C.epoll_ctl(epoll, EPOLL_CTL_ADD, fd, event) == 0
end

local function leave(fd)
  C.epoll_ctl(epoll, EPOLL_CTL_DEL, fd, event)
end

local function append(subscriber, start, stop)
  local tail = last[subscriber]
  if first[subscriber] ~= 0 and ends[tail] == start then
    ends[tail] = stop
    return
  end
  segments = segments + 1
  starts[segments], ends[segments], following[segments] = start, stop, 0
  if first[subscriber] == 0 then
    first[subscriber] = segments
    subscribers[touched] = subscriber
    touched = touched + 1
  else
    following[tail] = segments
  end
  last[subscriber] = segments
end

local function record(recorder, start, stop)
  ffi.copy(recorded + recorded_bytes, p + start, stop - start)
  recorded_bytes = recorded_bytes + stop - start
  if to_record == 0 or recorders[to_record - 1] ~= recorder then
    recorders[to_record] = recorder
    to_record = to_record + 1
  end
  record_ends[to_record - 1] = recorded_bytes
end

local function hand(fd, start, bytes)
  handed[to_hand], handed[to_hand + 1], handed[to_hand + 2] = fd, start, bytes
  to_hand = to_hand + 3
end

-- Writes the WebSocket frame of the frame at `at`. -> its start, its end
local function encode(at, next_at)
  local start, bytes = encoded, next_at - at - 2
  p[start] = 0x82  -- a final binary frame (RFC 6455 5.2)
  if bytes < 126 then
    p[start + 1] = bytes
    encoded = start + 2
  else
    p[start + 1], p[start + 2], p[start + 3] = 126, rshift(bytes, 8), band(bytes, 255)
    encoded = start + 4
  end
  ffi.copy(p + encoded, p + at + 2, bytes)
  encoded = encoded + bytes
  return start, encoded
end

-- Appends the frame at `at` to the messages of its subscriber; returns its end, or `at` if it can't be forwarded.
local function forward(fd, at, stop)
  if stop - at < PUBLISH_HEADER then return at end
  local next_at = at + p[at] * 256 + p[at + 1]
  local key = ffi.cast(u32_in, p + at + 3)
  if p[at + 2] ~= PUBLISH or next_at > stop or next_at - at < PUBLISH_HEADER or key[1] ~= etids[fd] then return at end
  local way = find(fd, key[0])
  if way < 0 then return at end
  local subscriber = routes[way].subscriber
  if generations[subscriber] ~= routes[way].generation then return at end
  local count = counts[routes[way].counter]
  count.messages, count.bytes = count.messages + 1, count.bytes + (next_at - at)
  if websockets[subscriber] == 0 then
    append(subscriber, at, next_at)
  else
    append(subscriber, encode(at, next_at))
  end
  if routes[way].recorder ~= 0 then record(routes[way].recorder, at, next_at) end
  return next_at
end

-- Forwards the masked WebSocket frame at `at`; returns its end, or `at` if it can't be forwarded.
local function forward_websocket(fd, at, stop)
  if stop - at < 6 + PUBLISH_HEADER - 2 or p[at] ~= 0x82 or p[at + 1] < 128 then return at end
  local bytes, head = p[at + 1] - 128, 6
  if bytes == 126 then bytes, head = p[at + 2] * 256 + p[at + 3], 8 end
  local next_at = at + head + bytes
  if bytes == 127 or next_at > stop or bytes + 2 > 0xFFFF or (head == 8 and bytes < 126) then return at end
  local key = ffi.cast(u32_in, p + at + head - 4)[0]
  local from, to = ffi.cast(u32_in, p + at + head), ffi.cast(u32_out, p + decoded + 2)
  -- Up to three bytes too many; what is behind them is written later, or was read before.
  for i = 0, rshift(bytes + 3, 2) - 1 do to[i] = bxor(from[i], key) end
  p[decoded], p[decoded + 1] = rshift(bytes + 2, 8), band(bytes + 2, 255)
  local start = decoded
  decoded = start + bytes + 2
  if forward(fd, start, decoded) == decoded then return next_at end
  decoded = start
  return at
end

local function receive(fd, forwards)
  local got = tonumber(C.recv(fd, p + used, RECEIVE, MSG_DONTWAIT))
  if got <= 0 then
    local errno = got < 0 and ffi.errno() or 0
    if errno ~= EAGAIN and errno ~= EINTR then hand(fd, errno, 0) end
    return
  end
  local at, stop = used, used + got
  used = stop
  -- A full receive is bulk: Python divides the time between such clients, and does not read them while others are behind.
  forwards = forwards and got < RECEIVE
  if forwards then
    local forward_one = websockets[fd] == 0 and forward or forward_websocket
    local next_at = forward_one(fd, at, stop)
    while next_at ~= at and next_at ~= stop do
      at = next_at
      next_at = forward_one(fd, at, stop)
    end
    at = next_at
  end
  if at < stop then hand(fd, at, stop - at) end
end

local function gather(segment)
  local to = encoded
  while segment ~= 0 do
    local bytes = ends[segment] - starts[segment]
    ffi.copy(p + encoded, p + starts[segment], bytes)
    encoded, segment = encoded + bytes, following[segment]
  end
  return to, encoded
end

local function send(subscriber)
  local segment = first[subscriber]
  local start, stop = starts[segment], ends[segment]
  if following[segment] ~= 0 then start, stop = gather(segment) end
  first[subscriber] = 0
  local sent = tonumber(C.send(subscriber, p + start, stop - start, MSG_DONTWAIT + MSG_NOSIGNAL))
  if sent == stop - start then return end
  if sent < 0 then
    local errno = ffi.errno()
    sent = (errno == EAGAIN or errno == EINTR) and 0 or errno + 2147483648
  end
  unsent[to_queue], unsent[to_queue + 1] = subscriber, start
  unsent[to_queue + 2], unsent[to_queue + 3] = stop - start, sent
  to_queue = to_queue + 4
end

local function send_all()
  for i = 0, touched - 1 do send(subscribers[i]) end
end

-- A turn after one that had no room for all ready sockets. It begins with the first that was left, because epoll reports
-- sockets that stay ready in the same order each time.
local function turn_from(first_event, ready, forwards)
  begin = 0
  for i = 0, ready - 1 do
    local at = (first_event + i) % ready
    if used > ROOM - RECEIVE then
      begin = at
      break
    end
    receive(events[at].fd, forwards)
  end
  send_all()
end

-- One turn; false for `forwards` hands all received data to Python.
local function turn(forwards)
  used, decoded, encoded, segments, touched = 0, DECODED, ENCODED, 0, 0
  local ready = C.epoll_wait(epoll, events, EVENTS, 0)
  if ready < 1 then return end
  if begin > 0 then return turn_from(begin < ready and begin or 0, ready, forwards) end
  receive(events[0].fd, forwards)
  for i = 1, ready - 1 do
    if used > ROOM - RECEIVE then
      begin = i
      break
    end
    receive(events[i].fd, forwards)
  end
  if touched == 0 then return end
  send(subscribers[0])
  for i = 1, touched - 1 do send(subscribers[i]) end
end

-- Makes `loop` ready when a stay has lasted long enough. A timeout of epoll_wait would cost 1 to 2 us for each message.
local function arm(ns)
  if armed_ns ~= 0 and armed_ns <= ns then return true end
  stay.value.tv_nsec = ns
  armed_ns = C.timerfd_settime(timer, 0, stay, nil) == 0 and ns or 0
  return armed_ns ~= 0
end

local function expired()
  C.read(timer, expirations, 8)
  armed_ns = 0
end

-- One turn. If messages are frequent and there is nothing to do for Python, it stays and waits for more of them instead
-- of the event loop, until another descriptor of the loop is ready: a turn of the event loop costs 10 us.
local function run(forwards, stay_ns)
  to_hand, to_queue, recorded_bytes, to_record = 0, 0, 0, 0
  turn(forwards)
  if stay_ns > 0 and to_hand == 0 and to_queue == 0 and now() - last_s < FREQUENT_S and arm(stay_ns) then
    repeat
      if C.epoll_wait(loop, outer, 2, -1) ~= 1 or outer[0].fd ~= epoll then break end
      turn(true)
    until to_hand > 0 or to_queue > 0 or recorded_bytes > ROOM
  end
  last_s = now()
  return to_record, to_queue / 4, to_hand / 3
end

local function address(a) return tonumber(ffi.cast("uintptr_t", a)) end
return run, expired, add, remove, join, leave, epoll, timer,
  address(p), address(generations), address(counts), address(handed), address(unsent),
  address(recorded), address(recorders), address(record_ends),
  { events, outer, event, time, stay, expirations }
