-- require "httpm": clients of http with methods for whole exchanges: forms, JSON, files (spec: bas-api §9).
local core = ...

local arg, pairs = core.arg, pairs

local BLOCK_BYTES <const> = 65536

local methods = {}
local class = core.http.subclass("httpm", methods)

-- The request of a call: the options `op`, overridden by `fields`.
local function request_of(op, fields, fname)
  local request = {}
  for name, value in pairs(arg.optional(arg.table, op, {}, 3, fname)) do request[name] = value end
  for name, value in pairs(fields) do request[name] = value end
  return request
end

local function with_header(op, name, value)
  local header = {}
  for key, other in pairs(op and op.header or {}) do header[key] = other end
  header[name] = header[name] or value
  return header
end

-- Send a request with a whole body; return the status, or nil and an error.
local function send(self, request, body, is_second)
  local ok, message, details = self:request(request)
  if not ok then return nil, message, details end
  ok, message = self:write(body)
  local status, fault, more = self:status()
  if not status then return nil, message or fault, more end
  if status == 401 and not is_second and string.find(self:header"www-authenticate" or "", "^[Dd]igest") then
    return send(self, request, body, true) -- now the client has the challenge of the server
  end
  return status
end

-- syntax: http:post(url, form [, op]) -> status, body | nil, error      form: a table, or URL-encoded text
function methods:post(url, form, op)
  local body = core.type(form) == "string" and form or core.http.form(arg.table(form, 2, "post"))
  local header = with_header(op, "Content-Type", "application/x-www-form-urlencoded")
  local request = request_of(op, {url = url, method = op and op.method or "POST", size = #body, header = header}, "post")
  local status, message, details = send(self, request, body)
  if not status then return nil, message, details end
  local data, fault = self:read("a")
  if not data then return nil, fault end
  return status, data
end

local function decoded(self, status)
  local data, message = self:read("a")
  if not data then return nil, message end
  if status < 200 or status > 299 then return nil, status, data end
  local value, fault = ba.json.decode(data)
  if value == nil then return nil, fault or "parse", data end
  return value
end

-- syntax: http:json(url, tab [, op]) -> table | nil, error or status, body
-- Sends a table as JSON and returns the JSON of the response as a table. Without a table: GET.
function methods:json(url, tab, op)
  if tab == nil then
    local ok, message, details = self:request(request_of(op, {url = url}, "json"))
    if not ok then return nil, message, details end
    local status, fault, more = self:status()
    if not status then return nil, fault, more end
    return decoded(self, status)
  end
  local body, encode_fault = ba.json.encode(arg.table(tab, 2, "json"))
  if not body then core.raise("bad argument #2 to 'json' (" .. encode_fault .. ")") end
  local header = with_header(op, "Content-Type", "application/json")
  local request = request_of(op, {url = url, method = op and op.method or "POST", size = #body, header = header}, "json")
  local status, message, details = send(self, request, body)
  if not status then return nil, message, details end
  return decoded(self, status)
end

-- Send a request without a body; return true for a status from 200 to 299, else nil and the error or status.
local function fetch(self, request)
  local ok, message, details = self:request(request)
  if not ok then return nil, message, details end
  local status, fault, more = self:status()
  if not status then return nil, fault, more end
  if status < 200 or status > 299 then
    self:read(0)
    return nil, status == 404 and "notfound" or status
  end
  return true
end

local function size_of(self)
  return math.tointeger(tonumber(self:header("content-length")))
end

-- syntax: http:stat(url [, op]) -> {size, mtime, type} | nil, "notfound" | nil, status | nil, error
function methods:stat(url, op)
  local ok, message, details = fetch(self, request_of(op, {url = url, method = "HEAD"}, "stat"))
  if not ok then return nil, message, details end
  local modified = self:header("last-modified")
  return {size = size_of(self), mtime = modified and ba.parsedate(modified), type = self:header("content-type")}
end

-- The open file `op.fp`, and true as third value; or the file `op.name` of `op.io`; or nil and an error.
local function open_file(op, mode, fname)
  if op.fp then return op.fp, nil, true end
  core.io.check(op.io, "io", fname)
  return op.io:open(arg.string(op.name, "name", fname), mode)
end

-- Call `func`, if there is one; false when it aborts the transfer.
local function report_progress(op, count, total)
  return not op.func or op.func(count, total) ~= false
end

local function send_file(self, file, op, size)
  local count = 0
  for data in function() return file:read(BLOCK_BYTES) end do
    local ok, message, details = self:write(data)
    if not ok then return nil, message, details end
    count = count + #data
    if not report_progress(op, count, size) then
      self:close()
      return nil, "aborted"
    end
  end
  return true
end

-- syntax: http:upload{url, io, name [, func(count, total)] [, method="PUT"] [, header] ...} -> true | nil, error or status
-- Sends a file. func is called during the transfer; it aborts the transfer by returning false.
function methods:upload(op)
  arg.table(op, 1, "upload")
  local file, message, is_given = open_file(op, "r", "upload")
  if not file then return nil, message end
  local closer <close> = not is_given and file or nil -- func may raise an error
  local stat = not is_given and op.io:stat(op.name)
  local size = stat and stat.size or op.size
  local request = request_of(op, {method = op.method or "PUT", size = size}, "upload")
  local done, fault, details = self:request(request)
  if done then done, fault, details = send_file(self, file, op, size) end
  if not done then return nil, fault, details end
  local status, failure, more = self:status()
  if not status then return nil, failure, more end
  self:read(0)
  if status < 200 or status > 299 then return nil, status end
  return true
end

local function receive_file(self, file, op)
  local count, size = 0, size_of(self)
  while true do
    local data, message, details = self:read()
    if not data then return message == nil or nil, message, details end
    local ok, fault = file:write(data)
    if not ok then return nil, fault end
    count = count + #data
    if not report_progress(op, count, size) then
      self:close()
      return nil, "aborted"
    end
  end
end

-- syntax: http:download{url, io, name [, func(count, total)] [, header] ...} -> true | nil, error or status
-- Receives a file. func is called during the transfer; it aborts the transfer by returning false. The file is created after a
-- successful response.
function methods:download(op)
  arg.table(op, 1, "download")
  local ok, message, details = fetch(self, op)
  if not ok then return nil, message, details end
  local file, fault, is_given = open_file(op, "w", "download")
  if not file then return nil, fault end
  local closer <close> = not is_given and file or nil -- func may raise an error
  local done, failure, more = receive_file(self, file, op)
  if not is_given then
    local closed, close_fault = file:close()
    if done and not closed then done, failure = nil, close_fault end
  end
  if not done and not is_given then op.io:remove(op.name) end
  if not done then return nil, failure, more end
  return true
end

-- syntax: httpm.create([op]) -> http       as http.create
local function create(op)
  return core.http.create(op, true, class)
end

return {create = create, parsequery = core.modules.httpc.parsequery}
