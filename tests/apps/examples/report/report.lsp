<?lsp app.answer(request, app.report) ?>
