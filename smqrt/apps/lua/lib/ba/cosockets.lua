-- Cosockets: sockets with their own coroutine, which waits for the socket (spec: bas-api §8.1 to §8.3, runtime §6).
local core = ...

local arg, pack, running, setmetatable, unpack, xpcall = core.arg, table.pack, coroutine.running, setmetatable, table.unpack, xpcall

local socket = core.socket
local py, owners, methods, self_of = socket.py, socket.owners, socket.methods, socket.self_of

local RunGuard = {__close = function(guard) -- the function returned, failed, or was killed
  local sock = guard.sock
  owners[guard.coroutine], sock.runner, sock.mode = nil, nil, nil
  sock:close()
end}

-- Runs f(sock, ...) as the cosocket of sock until it first waits. Returns false when too many starts are nested.
local function start(sock, mode, f, ...)
  local arguments, has_begun, ref = pack(...), false, nil
  sock.mode = mode
  ref = core.ref(function()
    has_begun = true
    local current = running()
    local guard <close> = setmetatable({sock = sock, coroutine = current}, RunGuard)
    sock.runner, owners[current] = current, sock
    local ok, message = xpcall(f, core.traceback, sock, unpack(arguments, 1, arguments.n))
    if not ok then core.log_error("Cosocket failed: " .. message) end
  end)
  py.start(ref)
  core.unref(ref)
  if not has_begun then sock.mode = nil end
  return has_begun
end

-- syntax: socket:event(f [,"r" | "s" [, arguments...]]) -> true | nil, "failed"
function methods:event(f, mode, ...)
  self_of(self, "event")
  arg["function"](f, 1, "event")
  mode = arg.optional(arg.string, mode, "r", 2, "event")
  if mode ~= "r" and mode ~= "s" then core.bad_argument(2, "event", '"r" or "s"', mode) end
  if not self.handle or self.mode then return nil, "failed" end
  if not start(self, mode, f, ...) then return nil, "failed" end
  return true
end

-- syntax: ba.socket.event(f [, arguments...]) -> socket | nil when f has returned
function ba.socket.event(f, ...)
  arg["function"](f, 1, "event")
  local sock = socket.new(nil)
  start(sock, "s", f, ...)
  return sock.runner and sock or nil
end

-- syntax: ba.socket.getsock() -> the socket of the running cosocket | nil
function ba.socket.getsock()
  return owners[running()]
end

-- syntax: socket:disable() -> values of enable (called by the cosocket itself) | true | nil, "incorrectuse"
function methods:disable()
  self_of(self, "disable")
  if self.runner and self.runner == running() then
    self.disabled = true
    local done, word = py.suspend(self.number, nil)
    self.disabled = nil
    if not done then return nil, word end
    return unpack(self.passed, 1, self.passed.n)
  end
  if not self.runner or not self.handle or not py.pause(self.handle, true) then return nil, "incorrectuse" end
  return true
end

-- syntax: socket:enable([values...]) -> true | false when it was not disabled
function methods:enable(...)
  self_of(self, "enable")
  if self.disabled then
    self.disabled, self.passed = nil, pack(...)
    return py.wake(self.number, nil)
  end
  return self.handle ~= nil and py.pause(self.handle, false) == true
end
