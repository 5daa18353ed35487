<?lsp
assert(ba.create.authenticator(mako.udb())) -- with the count behind it
local db, count = mako.udb()
print(count, db:getpwd"ann", type(db), mako.tldir:baseuri(), mako.rtldir:baseuri())
?>
