-- io.popen, os.execute, os.tmpname, os.remove and os.rename, which do not block other activities (spec: bas-api §17.1).
--
-- Their results are those of standard Lua.
local core, py = ...

local arg, isyieldable, raise = core.arg, core.isyieldable, core.raise
local byte, concat, find, format, ipairs, min = string.byte, table.concat, string.find, string.format, ipairs, math.min
local getmetatable, next, pack, rawtype, select, setmetatable = core.getmetatable, next, table.pack, core.rawtype, select, setmetatable
local sub, tonumber, unpack = string.sub, tonumber, table.unpack
local io, os = io, os

local MAX_READ <const> = 64 << 20
local NO_MEMORY <const>, ENOMEM <const> = "Cannot allocate memory", 12
local BAD_FILE <const>, EBADF <const> = "Bad file descriptor", 9
local READS_A_TURN <const> = 100
local WRITE_PIECE_BYTES <const> = 1 << 18 -- longer strings are passed to Python in pieces; other activities run in between
local MAX_NUMERAL_LENGTH <const> = 200 -- as in Lua

local function text_without_nul(value, index, fname)
  local text = arg.string(value, index, fname)
  if find(text, "\0", 1, true) then raise(format("bad argument #%d to '%s' (the string has a NUL character)", index, fname)) end
  return text
end

-- Returns what Lua returns for an exit status: true or nil, "exit" or "signal", and the code.
local function exit_results(status, message, number)
  if not status then return nil, message, number end
  if status < 0 then return nil, "signal", -status end
  return status == 0 or nil, "exit", status
end

-- ---- handles
--
-- number       of the command in Python, nil when closed
-- buffer, at   received data, and the position of its first unread byte

local methods = {}
local class = core.class("FILE*", methods)
local inputs, outputs = {}, {} -- place of an application -> its default file, when io.popen has made it

function class:__tostring()
  return self.number and format("file (0x%08x)", self.number) or "file (closed)"
end

local function drop(self)
  local number = self.number
  self.number = nil
  if number then py.drop(number) end
end

class.__gc = drop

local function open_handle(self, fname)
  local handle = arg.instance(self, class, "self", fname)
  if not handle.number then raise("attempt to use a closed file") end
  return handle
end

-- Appends output of the command to the buffer. Returns true, false at the end, or nil and the error.
local function fill(self)
  if not self.number or self.mode ~= "r" then return nil, BAD_FILE, EBADF end
  local data, message, code = false, nil, nil
  if not isyieldable() then data, message, code = py.read_now(self.number) end
  if data == false then data, message, code = py.read(self.number) end
  if not data then return nil, message, code end
  self.buffer, self.at = sub(self.buffer, self.at) .. data, 1
  return #data > 0
end

-- Returns the next character without taking it, "" at the end.
local function peek(self)
  while self.at > #self.buffer do
    local has_more, message, code = fill(self)
    if not has_more then return has_more == false and "" or nil, message, code end
  end
  return sub(self.buffer, self.at, self.at)
end

-- Reads up to the position that `find_stop` returns, and beyond the buffer while it returns nil.
local function read_until(self, find_stop)
  local pieces, count = {}, 0
  while true do
    local next_char, message, code = peek(self)
    if not next_char then return nil, message, code end
    if next_char == "" then break end
    local stop = find_stop(self.buffer, self.at, count)
    local piece = sub(self.buffer, self.at, stop or #self.buffer)
    pieces[#pieces + 1], count, self.at = piece, count + #piece, self.at + #piece
    if stop then break end
    if count > MAX_READ then return nil, NO_MEMORY, ENOMEM end
  end
  return count > 0 and concat(pieces) or nil
end

local function end_of_line(buffer, at) return (find(buffer, "\n", at, true)) end

local function no_end() return nil end

local function read_line(self, keeps_end)
  local line, message, code = read_until(self, end_of_line)
  if line and not keeps_end and byte(line, -1) == 10 then line = sub(line, 1, -2) end
  return line, message, code
end

local function read_all(self)
  local text, message, code = read_until(self, no_end)
  if message then return nil, message, code end
  return text or ""
end

local function read_count(self, size)
  if size == 0 then
    local next_char, message, code = peek(self)
    if message then return nil, message, code end
    return next_char ~= "" and "" or nil
  end
  size = min(size, 2 * MAX_READ) -- the sum below must not overflow
  return read_until(self, function(buffer, at, count)
    local stop = at + size - count - 1
    return stop <= #buffer and stop or nil
  end)
end

-- Reads a numeral as liolib.c of Lua does: the longest text with which a numeral may begin.
local function read_number(self)
  local text, length, fault = {}, 0, nil
  local function accept(pattern)
    local char, message, code = peek(self)
    if not char then fault = {message, code} end
    if not char or char == "" or not find(char, pattern) then return false end
    if length >= MAX_NUMERAL_LENGTH then
      text = {} -- not a number
      return false
    end
    length, self.at = length + 1, self.at + 1
    text[#text + 1] = char
    return true
  end
  local function digits(pattern)
    local count = 0
    while accept(pattern) do count = count + 1 end
    return count
  end
  while accept "%s" do text, length = {}, 0 end
  accept "[-+]"
  local is_hex, count, pattern = false, 0, "%d"
  if accept "0" then
    if accept "[xX]" then is_hex, pattern = true, "%x" else count = 1 end
  end
  count = count + digits(pattern)
  if accept "%." then count = count + digits(pattern) end
  if count > 0 and accept(is_hex and "[pP]" or "[eE]") then
    accept "[-+]"
    digits "%d"
  end
  if fault then return nil, fault[1], fault[2] end
  return tonumber(concat(text))
end

local FORMATS <const> = {
  n = read_number, a = read_all, l = read_line, L = function(self) return read_line(self, true) end,
}

-- Returns the function that reads a format, and its argument.
local function reader_of(wanted, index)
  if rawtype(wanted) == "number" then return read_count, arg.size(wanted, index, "read") end
  local name = arg.string(wanted, index, "read"):gsub("^%*", "")
  local reader = FORMATS[sub(name, 1, 1)]
  if not reader then raise(format("bad argument #%d to 'read' (invalid format)", index)) end
  return reader
end

-- Yields after some reads: those of buffered data, perhaps thousands of lines, do not wait.
local function yield_if_due(self)
  self.reads = self.reads + 1
  if self.reads % READS_A_TURN == 0 and isyieldable() then core.pause() end
end

local read

function read(self, ...)
  yield_if_due(self)
  local count = select("#", ...)
  if count == 0 then return read(self, "l") end
  local values = {}
  for at = 1, count do
    local reader, size = reader_of((select(at, ...)), at)
    local value, message, code = reader(self, size)
    if message then return nil, message, code end
    values[at] = value
    if value == nil then return unpack(values, 1, at) end
  end
  return unpack(values, 1, count)
end

-- syntax: file:read([format, ...]) -> values      as in Lua: "l", "L", "a", "n", a number of bytes
function methods:read(...) return read(open_handle(self, "read"), ...) end

-- syntax: for values in file:lines([format, ...]) do ... end
function methods:lines(...)
  local handle, formats = open_handle(self, "lines"), pack(...)
  return function()
    if not handle.number then raise("file is already closed") end
    local values = pack(read(handle, unpack(formats, 1, formats.n)))
    if values[1] == nil and values[2] then raise(values[2]) end
    return unpack(values, 1, values.n)
  end
end

local function put_piece(self, text)
  if self.mode ~= "w" or not self.number then return nil, BAD_FILE, EBADF end -- another activity may have closed it
  if isyieldable() then return py.write(self.number, text) end
  local count, message, code = py.write_now(self.number, text)
  if not count then return nil, message, code end
  return count == #text or py.write(self.number, sub(text, count + 1)) -- can't wait here: returns an error
end

local function put(self, text)
  if #text <= WRITE_PIECE_BYTES then return put_piece(self, text) end
  for at = 1, #text, WRITE_PIECE_BYTES do
    local ok, message, code = put_piece(self, sub(text, at, at + WRITE_PIECE_BYTES - 1))
    if not ok then return nil, message, code end
  end
  return true
end

local function write(self, ...)
  for at = 1, select("#", ...) do
    local text = arg.string(select(at, ...), at, "write")
    local ok, message, code = put(self, text)
    if not ok then return nil, message, code end
  end
  return self
end

-- syntax: file:write(value, ...) -> file | nil, error, number      without a buffer
function methods:write(...) return write(open_handle(self, "write"), ...) end

function methods:flush()
  open_handle(self, "flush")
  return true
end

local WHENCE <const> = {set = true, cur = true, ["end"] = true}
local BUFFERING <const> = {no = true, full = true, line = true}

local function check_option(value, options, fname)
  if not options[arg.string(value, 1, fname)] then raise(format("bad argument #1 to '%s' (invalid option '%s')", fname, value)) end
end

function methods:seek(whence, offset)
  open_handle(self, "seek")
  check_option(whence == nil and "cur" or whence, WHENCE, "seek")
  arg.optional(arg.integer, offset, 0, 2, "seek")
  return nil, "Illegal seek", 29
end

function methods:setvbuf(mode, size)
  open_handle(self, "setvbuf")
  check_option(mode, BUFFERING, "setvbuf")
  arg.optional(arg.integer, size, nil, 2, "setvbuf")
  return true
end

-- syntax: file:close() -> true, "exit", 0 | nil, "exit", code | nil, "signal", number      Waits until the command has exited.
function methods:close()
  local handle = open_handle(self, "close")
  local number = handle.number
  if not isyieldable() then return exit_results(py.close(number)) end -- can't wait here: returns an error
  handle.number, handle.buffer = nil, ""
  return exit_results(py.close(number))
end

function class:__close()
  if self.number and isyieldable() then self:close() else drop(self) end
end

-- syntax: io.popen(command [, "r" | "w"]) -> file | nil, error, number
function io.popen(command, mode)
  command = text_without_nul(command, 1, "popen")
  mode = mode == nil and "r" or arg.string(mode, 2, "popen")
  if mode ~= "r" and mode ~= "w" then raise("bad argument #2 to 'popen' (invalid mode)") end
  local number, message, code = py.popen(command, mode, core.application())
  if not number then return nil, message, code end
  return setmetatable({number = number, mode = mode, buffer = "", at = 1, reads = 0}, class)
end

-- ---- the functions of io that take any file

local plain = {}
for _, name in ipairs{"close", "input", "lines", "output", "read", "type", "write"} do plain[name] = io[name] end

local function is_popen_file(value) return getmetatable(value) == class end

-- Returns the default file of the running application when io.popen has made it.
local function default(files)
  return next(files) and files[py.place(core.application())]
end

local function opened_default(files, what)
  local file = default(files)
  if file and not file.number then raise("default " .. what .. " file is closed") end
  return file
end

-- Makes io.input and io.output, which also take file names and files of Lua.
local function make_default(files, name)
  return function(file)
    if file == nil then return default(files) or plain[name]() end
    local own = is_popen_file(file) and file or nil
    if own or next(files) then files[py.place(core.application())] = own end
    return own or plain[name](file)
  end
end

io.input, io.output = make_default(inputs, "input"), make_default(outputs, "output")

function io.read(...)
  local file = opened_default(inputs, "input")
  if file then return read(file, ...) end
  return plain.read(...)
end

function io.write(...)
  local file = opened_default(outputs, "output")
  if file then return write(file, ...) end
  return plain.write(...)
end

function io.lines(name, ...)
  local file = name == nil and opened_default(inputs, "input")
  if file then return file:lines(...) end
  return plain.lines(name, ...)
end

function io.close(...)
  local file = ...
  if file == nil then file = opened_default(outputs, "output") end
  if is_popen_file(file) then return file:close() end
  return plain.close(...)
end

function io.type(...)
  local file = ...
  if is_popen_file(file) then return file.number and "file" or "closed file" end
  if select("#", ...) == 0 then raise("bad argument #1 to 'type' (value expected)") end
  return plain.type(...)
end

-- ---- os

-- syntax: os.execute(command) -> true, "exit", 0 | nil, "exit", code | nil, "signal", number      os.execute() -> true
function os.execute(command)
  if command == nil then return py.has_shell() end
  return exit_results(py.execute(text_without_nul(command, 1, "execute"), core.application()))
end

function os.tmpname()
  local name = (isyieldable() and py.make_temporary or py.make_temporary_here)()
  return name or raise("unable to generate a unique filename")
end

local plain_remove, plain_rename = os.remove, os.rename

function os.remove(name)
  name = text_without_nul(name, 1, "remove")
  return (isyieldable() and py.remove or plain_remove)(name)
end

function os.rename(from, to)
  from, to = text_without_nul(from, 1, "rename"), text_without_nul(to, 2, "rename")
  return (isyieldable() and py.rename or plain_rename)(from, to)
end
