<?lsp app.store:open "index.html" collectgarbage() collectgarbage() print "forgotten" ?>
