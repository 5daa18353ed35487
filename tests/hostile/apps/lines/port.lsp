<?lsp print((select(2, app.listener:sockname()))) ?>
