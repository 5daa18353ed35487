<?lsp response:write(app.port) ?>
