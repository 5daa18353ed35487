<?lsp response:write(app.nothing.here) ?>
