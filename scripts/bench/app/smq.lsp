<?lsp if require "smq.hub".isSMQ(request) then app.smq:connect(request) else response:senderror(404) end ?>
