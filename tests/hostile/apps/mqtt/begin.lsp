<?lsp app.begin(tonumber(request:data().port)) ?>
