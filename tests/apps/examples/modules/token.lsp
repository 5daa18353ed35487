<?lsp response:write(ba.aesencode(app.key, request:data"name")) ?>
