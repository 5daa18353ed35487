<?lsp app.hubs[request:data("hub") or "stream"]:connect(request) ?>
