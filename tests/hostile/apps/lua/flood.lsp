<?lsp
-- Takes what comes for some seconds: flood.lsp?how=accept|udp&port=...     prints how much came
local query = request:data()
local sock = query.how == "udp" and ba.socket.udpcon(tonumber(query.port)) or ba.socket.bind(tonumber(query.port))
local count = 0
assert(sock:event(function(me)
   while true do
      local got = query.how == "udp" and me:read() or query.how ~= "udp" and me:accept()
      if not got then return end
      if query.how ~= "udp" then got:close() end
      count = count + 1
   end
end))
ba.sleep(tonumber(query.ms))
sock:close()
print(count)
?>
