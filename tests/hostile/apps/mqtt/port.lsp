<?lsp print(app.broker:status().port) ?>
