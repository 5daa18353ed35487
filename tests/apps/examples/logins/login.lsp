<?lsp
-- login, logout and the questions about them; ?do=name
local function show(...) print(...) end
local what = request:data "do"
if what == "login" then
  show(request:login(request:data "name"))
elseif what == "full" then
  show(request:login(request:data "name", 1, false))
elseif what == "logout" then
  show(request:logout())
elseif what == "everywhere" then
  show(request:logout(true))
elseif what == "session" then
  request:session(true).basket = "apples"
end
show(request:user())
local session = request:session()
if session then show(session.basket, session:maxinactiveinterval()) end
show(table.concat(ba.users(), ","))
show(#ba.sessions(request:data "name" or "ann"))
?>
