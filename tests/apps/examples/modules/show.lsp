<?lsp response:write(app.show()) ?>
