<?lsp
-- Browsers come with a WebSocket, devices with a raw socket; from here on they speak SMQ.
if require "smq.hub".isSMQ(request) then
   app.smq:connect(request)
else
   response:senderror(404, "This address speaks SMQ; the page is one level up.")
end
?>
