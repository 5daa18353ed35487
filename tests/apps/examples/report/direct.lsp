<?lsp app.answer(request, app.direct) ?>
