-- ba.forkpty: child processes on a pseudo terminal (spec: bas-api §7, §17).
local core, py = ...

local arg, dump, octets, pairs, rawtype, select = core.arg, core.table_codec.dump, core.octets, pairs, core.rawtype, select
local setmetatable, tostring, type, xpcall = setmetatable, tostring, core.type, xpcall

local methods = {}
local class = core.class("pty", methods)
local callbacks = {} -- number -> pty with a callback, until its child has exited or it is closed

local function close(self)
  callbacks[self.number] = nil
  return py.close(self.number)
end

class.__gc = function(self) py.drop(self.number) end
class.__close = close

local function number_of(self, fname) return arg.instance(self, class, "self", fname).number end

py.attach(core.ref(function(number)
  local self = callbacks[number]
  if not self then return end
  repeat
    local ok, message = xpcall(self.callback, core.traceback, self)
    if not ok then
      core.log_error("Pty callback failed: " .. message)
      close(self)
    end
  until not py.again(number)
  if py.over(number) then callbacks[number] = nil end -- the callback will not be called again
end))

-- ---- the command and its options

local function words_of(...)
  local words = {}
  for at = 1, select("#", ...) do words[at] = arg.string(select(at, ...), at, "forkpty") end
  if #words == 0 then core.raise("bad argument #1 to 'forkpty' (command expected)") end
  return words
end

-- Returns variables by name. Accepts them by name and as strings "NAME=value"; false removes a variable.
local function environment(env)
  local variables = {}
  for key, given in pairs(arg.optional(arg.table, env, {}, "env", "forkpty")) do
    local name, value = key, given
    if rawtype(key) == "number" then
      name, value = arg.string(given, "env", "forkpty"):match("^([^=]*)=?(.*)$")
    end
    variables[arg.string(name, "env", "forkpty")] = value ~= false and arg.string(value, "env", "forkpty")
  end
  return variables
end

-- Returns the arguments of stty; "sane" for true.
local function mode_of(stty)
  if stty == nil or stty == false then return nil end
  if stty == true then return "sane" end
  if type(stty) == "table" then return table.concat(stty, " ") end
  return arg.string(stty, "stty", "forkpty")
end

local function options_of(op)
  return {
    env = environment(op.env), stty = mode_of(op.stty), arg0 = arg.optional(arg.string, op.arg0, nil, "arg0", "forkpty"),
  }
end

local function fork(op, ...)
  local f = arg.optional(arg["function"], op.async, nil, "async", "forkpty")
  local number, message, detail = py.fork(dump(words_of(...)), dump(options_of(op)), f ~= nil, core.application())
  if not number then return nil, message, detail end
  local self = setmetatable({number = number, callback = f}, class)
  if f then
    callbacks[number] = self
    py.start(number)
  end
  return self
end

-- syntax: ba.forkpty([callback | {async =, env =, stty =, arg0 =},] command, ...) -> pty | nil, error
function ba.forkpty(first, ...)
  if rawtype(first) == "function" then return fork({async = first}, ...) end
  if type(first) == "table" then return fork(first, ...) end
  return fork({}, first, ...)
end

-- ---- methods

-- syntax: pty:read([ms]) -> data, is_stderr | nil, "timeout" | nil, "terminated"       data: never empty
function methods:read(ms)
  local number = number_of(self, "read")
  local data, is_stderr = py.read(number, arg.optional(arg.milliseconds, ms, nil, 1, "read"))
  if data then return data, is_stderr end
  return nil, data == false and "timeout" or "terminated"
end

-- syntax: pty:write(data) -> true | nil, error
function methods:write(data)
  return py.write(number_of(self, "write"), octets(data, 1, "write"))
end

-- syntax: pty:winsize(rows, columns) -> true | nil, error      pty:winsize() -> rows, columns
function methods:winsize(rows, columns)
  local number = number_of(self, "winsize")
  if rows == nil then return py.winsize(number) end
  return py.set_winsize(number, arg.integer(rows, 1, "winsize"), arg.integer(columns, 2, "winsize"))
end

-- syntax: pty:pause([on = true]) -> true
function methods:pause(on)
  return py.pause(number_of(self, "pause"), arg.optional(arg.boolean, on, true, 1, "pause"))
end

-- syntax: pty:close() -> true | false when it was closed before      pty:close(true) -> exit status
function methods:close(wait)
  local number = number_of(self, "close")
  local was_closed = self.closed
  self.closed = true
  callbacks[number] = nil
  if arg.optional(arg.boolean, wait, false, 1, "close") then return py.close_and_wait(number) end
  if was_closed then return false end
  return py.close(number)
end

-- syntax: pty:terminate() -> true, exit status
function methods:terminate()
  local number = number_of(self, "terminate")
  self.closed = true
  callbacks[number] = nil
  local status = py.terminate(number)
  return status ~= nil, status
end
