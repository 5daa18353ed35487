<?lsp
-- Browsers connect with a WebSocket, devices with a raw socket. From here on the protocol is SMQ.
if require "smq.hub".isSMQ(request) then
   app.smq:connect(request)
else
   response:senderror(404, "This address speaks SMQ; the page is one level up.")
end
?>
