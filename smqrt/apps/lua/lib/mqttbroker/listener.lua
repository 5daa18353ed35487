-- The sockets of a broker: a listener, and for each client a cosocket that reads and one that writes.

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
      return -- the server stops
    end
  end
end

local listener = {}

--- An outbox whose packets are written to a socket. A client that reads slowly blocks only its own writer.
function listener.outbox(sock, totals)
  local writer
  local box = outbox.new(totals, function() if writer then writer:enable(true) end end)
  writer = ba.socket.event(write_all, box, sock)
  return box
end

--- Lets the cosocket that runs wait, while the others go on.
function listener.rest(sock, ms)
  ba.timer(function() sock:enable() end):set(ms, true)
  sock:disable()
end

-- "failed" passes: there are no file descriptors left at the moment.
local function accept_all(sock, serve, report)
  while true do
    local client, word = sock:accept()
    if client then
      client:event(serve, "s")
    elseif word == "failed" then
      report(word)
      listener.rest(sock, RETRY_MS)
    else
      return
    end
  end
end

--- Listens; serve(sock) runs as a cosocket for each client. Returns the socket, or nil and the error.
-- report: called with the word of an error after which listening continues.
function listener.open(address, port, shark, serve, report)
  local sock, fault = ba.socket.bind(port, {intf = address, shark = shark})
  if not sock then return nil, fault end
  sock:event(accept_all, "r", serve, report)
  return sock
end

return listener
