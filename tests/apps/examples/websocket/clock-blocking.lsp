<?lsp
local ms = app.interval(request)
local sock <close> = app.websocket(request)
if sock then app.clock(sock, ms) end
?>
