-- Listening sockets of a broker.

local python = require "mqttbroker.python"

local RETRY_MS <const> = 100

local listener = {}

-- Suspend the running cosocket of `sock` for `ms` milliseconds.
local function pause(sock, ms)
  ba.timer(function() sock:enable() end):set(ms, true)
  sock:disable()
end

local function accept_all(sock, broker, report, ended)
  local guard <close> = setmetatable({}, {__close = ended}) -- also when the cosocket is killed
  while true do
    local client, word = sock:accept()
    if client then
      python.serve(broker, client)
    elseif word == "failed" then -- temporarily: no free file descriptor
      report(word)
      pause(sock, RETRY_MS)
    else
      return
    end
  end
end

--- Listen on a port for a broker, given by its number in Python. Returns the socket, or nil and the error.
-- report: called with the word of an error after which listening continues. ended: called when listening has ended.
function listener.open(address, port, shark, broker, report, ended)
  local sock, fault = ba.socket.bind(port, {intf = address, shark = shark})
  if not sock then return nil, fault end
  sock:event(accept_all, "r", broker, report, ended)
  return sock
end

return listener
