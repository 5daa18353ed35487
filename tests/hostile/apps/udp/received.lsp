<?lsp response:write(app.received, " ", app.bytes) ?>
