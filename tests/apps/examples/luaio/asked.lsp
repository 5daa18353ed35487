<?lsp print(app.asked[#app.asked]) ?>
