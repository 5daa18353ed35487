<?lsp
local session = request:session(true)
session.visits = (session.visits or 0) + 1
response:json{visits = session.visits, name = "smqrt", readings = {1, 2.5, 3, 4.25, 5}}
?>
