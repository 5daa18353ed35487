-- The sockets of a broker: a listener, and for each client a cosocket that reads and one that writes.

local outbox = require "mqttbroker.outbox"

local clock = ba.clock

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

--- An outbox whose packets are written to a socket. A client that reads slowly makes nobody wait but its own writer.
function listener.outbox(sock, totals)
  local writer
  local box = outbox.new(totals, function() if writer then writer:enable(true) end end)
  writer = ba.socket.event(write_all, box, sock)
  return box
end

--- Gives the other cosockets a turn.
function listener.rest(sock)
  ba.timer(function() sock:enable() end):set(1, true)
  sock:disable()
end

local function accept_all(sock, serve)
  while true do
    local client = sock:accept()
    if not client then return end
    client:event(serve, "s")
  end
end

--- Listens; each client is given to serve(sock) as a cosocket. Returns the socket, or nil and the error.
function listener.open(address, port, shark, serve)
  local sock, fault = ba.socket.bind(port, {intf = address, shark = shark})
  if not sock then return nil, fault end
  sock:event(accept_all, "r", serve)
  return sock
end

return listener
