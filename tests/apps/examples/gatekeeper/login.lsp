<?lsp response:json{token = app.login(request)} ?>
