-- The Python half of the broker, and conversions of values for it.
local core, py = ...

local dump, load = core.table_codec.dump, core.table_codec.load

local NUMBERS <const> = {payloadformatindicator = true, messageexpiryinterval = true} -- all other properties are texts

local python = {py = py, ref = core.ref, pause = core.pause, load = load}

--- The socket of a network client, for inspection; nil when it has disconnected.
function python.socket(number)
  local handle = py.socket(number)
  return handle and core.socket.new(handle)
end

--- Mark the socket of a client that has disconnected as closed.
function python.forget(socket) core.socket.forget(socket) end

--- Let a broker serve an accepted connection. The socket ends, without closing the connection.
function python.serve(broker, socket)
  local handle = socket.handle
  socket.handle, socket.closed = nil, true
  py.serve(broker, handle)
end

--- The error when the server has no users to authenticate clients; nil when it has.
function python.fault_of_server()
  local fault = py.fault_of_server()
  return fault and "bad argument #2 to 'create' (" .. fault .. ")"
end

--- The bytes of message properties; "" for an empty table.
function python.pack_properties(values)
  local given = {}
  for name, value in pairs(values) do given[name] = NUMBERS[name] and value or tostring(value) end
  return next(given) and py.pack_message(dump(given)) or ""
end

return python
