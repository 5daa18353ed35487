<?lsp request:session(true) print(#ba.sessions()) ?>
