<?lsp response:json{orders = #app.orders > 0 and app.orders or {"none"}} ?>
