<?lsp
local db, count = mako.udb()
print(count, db:getpwd"ann", type(db), mako.tldir:baseuri(), mako.rtldir:baseuri())
?>
