<?lsp
-- Asks an NTP server for the time: /ntp.lsp?server=...&port=... (RFC 5905, client mode).
local SECONDS_1900_TO_1970 <const> = 2208988800

local query = request:data()
local udp <close> = ba.socket.udpcon(query.server or "pool.ntp.org", math.tointeger(tonumber(query.port)) or 123)

local function time()
  if not udp then return nil, "no such server" end
  for _ = 1, 3 do -- datagrams get lost
    udp:write("\x1B" .. ("\0"):rep(47))
    local reply = udp:read(1000)
    if reply and #reply >= 48 then
      local seconds, fraction = ba.socket.n2h(4, reply, 41), ba.socket.n2h(4, reply, 45)
      return seconds - SECONDS_1900_TO_1970, fraction / 2^32
    end
  end
  return nil, "no answer"
end

local seconds, fraction = time()
if not seconds then
  response:setstatus(504)
  response:write(fraction)
  return
end
response:json{unix = seconds, fraction = fraction, text = ba.datetime(seconds):tostring()}
?>
