<?lsp
local name = app.whois(request)
if not request:header "Sec-WebSocket-Key" then response:senderror(404) return end
local sock = ba.socket.req2sock(request)
if sock then sock:event(app.shell, "s", name) end
?>
