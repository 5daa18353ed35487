<?lsp app.answer(request, app.order) ?>
