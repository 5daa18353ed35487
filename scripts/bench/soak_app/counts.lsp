<?lsp
local hub = app.hubs.stream
response:json{drops = hub:drops(), refused = hub:refused()}
?>
