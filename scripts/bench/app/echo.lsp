<?lsp
-- Echoes the messages of a WebSocket, as a cosocket.
ba.socket.req2sock(request):event(function(sock)
  while true do
    local data, istext = sock:read()
    if not data then break end
    sock:write(data, istext)
  end
end, "s")
?>
