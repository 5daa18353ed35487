<?lsp
-- A WebSocket client: sends the parameter `text` to the echo at `url` and shows what comes back. With `cosocket`, from one.
local query = request:data()
local http <close> = require"httpc".create()

local function ask(sock)
  sock:write(query.text, true)
  local answer, istext = sock:read(5000)
  sock:close()
  return answer and istext and answer or "no answer: " .. tostring(istext)
end

local ok, err = http:request{url = query.url}
if not ok then
  response:setstatus(502)
  print(err)
  return
end
local sock <close> = ba.socket.http2sock(http)
if not query.cosocket then
  response:write(ask(sock))
  return
end
local answer
sock:event(function(me) answer = ask(me) end, "s")
while not answer do ba.sleep(5) end
response:write(answer)
?>
