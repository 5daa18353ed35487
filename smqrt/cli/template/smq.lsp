<?lsp
-- Browsers (WebSocket) and devices (raw SMQ) connect here.
if require "smq.hub".isSMQ(request) then
   app.smq:connect(request)
else
   response:senderror(404, "This address speaks SMQ.")
end
?>
