<?lsp
local ms = app.interval(request)
local sock = app.websocket(request)
if sock then sock:event(app.clock, "s", ms) end
?>
