<?lsp
local name, password, kind = app.manual:authenticate(request, "manual.lsp")
if not name then return end
print(name, password, kind)
print(app.acl:authorize(request, "GET", "/folder/x"), app.acl:authorize(request, "GET", "x"), app.acl:authorize(request, "PUT", "folder/x"))
?>
