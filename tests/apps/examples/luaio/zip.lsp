<?lsp
local zip = ba.mkio(app.store, "z.zip")
print((zip:resourcetype()), zip:open "d/a.txt":read "a", zip:stat "none")
print(ba.mkio(app.store, "index.html"))
?>
