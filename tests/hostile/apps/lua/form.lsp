<?lsp
-- Query and form parameters.
local count = 0
for _ in request:datapairs() do count = count + 1 end
print(count)
?>
