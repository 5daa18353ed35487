<?lsp app.answer(request, app.note) ?>
