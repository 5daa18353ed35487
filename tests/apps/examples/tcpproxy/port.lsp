<?lsp
-- Sets the port of the target, and tells that of the proxy: /port.lsp?target=...
app.target_port = math.tointeger(tonumber(request:data"target"))
response:write((select(2, app.listener:sockname())))
?>
