<?lsp app.join(request) ?>
