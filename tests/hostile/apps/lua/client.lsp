<?lsp
-- Makes an SMQ client of another broker: client.lsp?url=...
app.smqclient = require "smq.client".create(request:data().url, {timeout = 2000, ping = 1, pong = 1})
print "made"
?>
