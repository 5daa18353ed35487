<?lsp= app.color ?>
