<?lsp
local sock <close> = app.websocket(request)
if sock then app.echo(sock) end
?>
