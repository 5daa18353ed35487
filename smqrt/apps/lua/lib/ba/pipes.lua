-- ba.pipe: named pipes (spec: bas-api §7).
local core, py = ...

local arg = core.arg

local DEFAULT_PERMISSIONS <const>, MAX_PERMISSIONS <const> = 384, 511 -- 0600, for the server's user only; 0777

ba.pipe = {}

-- Returns the io object and the absolute path of `path`, or the io object, nil and an error word.
-- `path` is relative to the home io unless it begins with a slash.
local function locate(path, fname)
  local name = path:sub(1, 1) == "/" and "disk" or "home"
  local io = ba.openio(name) or core.raise(fname .. ": there is no io '" .. name .. "'")
  local full, message = io:realpath(path)
  return io, full, message
end

-- syntax: ba.pipe.mkfifo(path [, permissions=384]) -> true | nil, error
function ba.pipe.mkfifo(path, permissions)
  path = arg.string(path, 1, "mkfifo")
  permissions = arg.optional(arg.size, permissions, DEFAULT_PERMISSIONS, 2, "mkfifo")
  if permissions > MAX_PERMISSIONS then core.raise("bad argument #2 to 'mkfifo' (permissions are 0 to 511)") end
  local _, full, message = locate(path, "mkfifo")
  if not full then return nil, message end
  return py.make(full, permissions)
end

local MODES <const> = {r = "r", w = "w", a = "a", rw = "r+", ["r+"] = "r+"}

-- syntax: ba.pipe.open(path [, "r" | "w" | "rw"]) -> file | nil, error
-- Opening does not wait. A read waits for a writer and returns nil when the last writer has closed. A write waits for a reader.
function ba.pipe.open(path, mode)
  path = arg.string(path, 1, "open")
  mode = MODES[arg.optional(arg.string, mode, "r", 2, "open")] or core.raise('bad argument #2 to \'open\' ("r", "w" or "rw" expected)')
  local io, full, message = locate(path, "open")
  if not full then return nil, message end
  local is_pipe, word = py.check(full)
  if not is_pipe then return nil, word end
  local file, fault = io:open(path, mode)
  if file then py.end_with_app(file.handle, core.application()) end
  return file, fault
end
