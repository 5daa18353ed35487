-- Sockets of a broker: its listeners, and for each client one cosocket that reads and one that writes.

local outbox = require "mqttbroker.outbox"

local clock = ba.clock

local RETRY_MS <const> = 100

local function write_all(cosock, box, sock)
  while true do
    local bytes = box:take(clock())
    if bytes then
      if not sock:write(bytes) then return end
      box:written(#bytes)
    elseif box.finished then
      return sock:close()
    elseif not cosock:disable() then
      return -- the server shuts down
    end
  end
end

local listener = {}

--- An outbox whose packets are written to a socket. A slow client blocks only the cosocket that writes to it.
function listener.outbox(sock, totals)
  local writer
  local box = outbox.new(totals, function() if writer then writer:enable(true) end end)
  writer = ba.socket.event(write_all, box, sock)
  return box
end

--- Suspend the running cosocket of `sock` for `ms` milliseconds.
function listener.pause(sock, ms)
  ba.timer(function() sock:enable() end):set(ms, true)
  sock:disable()
end

local function accept_all(sock, serve, report)
  while true do
    local client, word = sock:accept()
    if client then
      client:event(serve, "s")
    elseif word == "failed" then -- temporarily: no free file descriptor
      report(word)
      listener.pause(sock, RETRY_MS)
    else
      return
    end
  end
end

--- Listen on a port; `serve(sock)` runs in a cosocket for each client. Returns the socket, or nil and the error.
-- report: called with the word of an error after which listening continues.
function listener.open(address, port, shark, serve, report)
  local sock, fault = ba.socket.bind(port, {intf = address, shark = shark})
  if not sock then return nil, fault end
  sock:event(accept_all, "r", serve, report)
  return sock
end

return listener
