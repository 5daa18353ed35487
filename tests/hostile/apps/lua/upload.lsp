<?lsp
-- A multipart form, read to its end.
local bytes = 0
local ok, err = request:multipart{
   formdata = function(name, value) bytes = bytes + #name + #value end,
   beginfile = function() end,
   filedata = function(data) bytes = bytes + #data end,
}
print(ok and bytes or err)
?>
