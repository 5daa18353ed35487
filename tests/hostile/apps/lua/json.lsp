<?lsp
-- A JSON body, read whole.
local parts = {}
for data in request:rawrdr() do parts[#parts + 1] = data end
local value, err = ba.json.decode(table.concat(parts))
print(value ~= nil and type(value) or err)
?>
