<?lsp
-- Lists the application's folder, and looks at some of its files: files.lsp?folder=...
local count, bytes = 0, 0
local folder = request:data().folder
for name, isdir, mtime, size in app.io:files(folder, true) do
   count, bytes = count + 1, bytes + size
   if count % 10 == 0 then bytes = bytes + app.io:stat(folder .. "/" .. name).size end
end
print(count, bytes)
?>
