-- require "socket.core": the global `socket`, with the functions of LuaSocket (spec: bas-api §12).
return socket
