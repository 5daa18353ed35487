<?lsp
-- A body of any kind, read in pieces and thrown away.
local bytes = 0
for data in request:rawrdr() do bytes = bytes + #data end
print(bytes)
?>
