<?lsp
-- A session for every visitor.
print(request:session(true):id())
?>
