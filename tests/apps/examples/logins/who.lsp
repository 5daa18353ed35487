<?lsp
local session = request:session()
print(request:user())
if session then print(session:user()) end
if request:data "attempt" then session = request:session(true) end
if session then print(session:id(true)) end
?>
