<?lsp
-- A page that begins a process which outlives it: the application ends it.
app.sleeper = assert(ba.forkpty("sleep", "1000"))
print "begun"
?>
