<?lsp response:write((select(2, app.sock:sockname()))) ?>
