<?lsp
-- Takes a WebSocket that is going to be idle, as a cosocket.
ba.socket.req2sock(request):event(function(sock) sock:read() end, "s")
?>
