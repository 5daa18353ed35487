<?lsp print(app.seen()) ?>
