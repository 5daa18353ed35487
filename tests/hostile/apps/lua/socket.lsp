<?lsp
-- Meets another server through a socket: socket.lsp?how=websocket|read|write&url=...&port=...
local query = request:data()
local sock, err
if query.how == "websocket" then
   local http = require "httpc".create()
   assert(http:request{url = query.url})
   sock, err = ba.socket.http2sock(http)
else
   sock, err = ba.socket.connect("127.0.0.1", tonumber(query.port))
end
local count = 0
while sock do
   local done, fault
   if query.how == "write" then
      done, fault = sock:write(("x"):rep(60000))
      count = count + (done and 60000 or 0)
   else
      done, fault = sock:read(5000)
      count = count + #(done or "")
   end
   if not done or count > 100000000 then err = fault break end
end
if sock then sock:close() end
print(count, err)
?>
