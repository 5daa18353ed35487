<?lsp
local sock = app.websocket(request)
if sock then sock:event(app.echo, "s") end
?>
