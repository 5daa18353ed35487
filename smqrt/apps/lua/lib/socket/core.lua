-- require "socket.core": the functions of LuaSocket, which are the global `socket` (spec: bas-api §12).
return socket
