<?lsp app.smq:connect(request) ?>
