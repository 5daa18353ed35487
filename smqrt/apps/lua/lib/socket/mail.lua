-- require "socket.mail", also socket.mail: mail through an SMTP server (spec: bas-api §12).
local core, py = ...

local arg, concat, ipairs, match, next = core.arg, table.concat, ipairs, string.match, next
local rawtype, setmetatable = core.rawtype, setmetatable

local MAX_FILE_BYTES <const> = py.max_bytes()

local methods = {}
local class = core.class("mail", methods)

-- ---- files

local function from_source(source, fname)
  local parts, size = {}, 0
  while size <= MAX_FILE_BYTES do
    local chunk, word = source()
    if chunk == nil then
      if word then return nil, word end
      return concat(parts)
    end
    chunk = arg.string(chunk, "source", fname)
    parts[#parts + 1], size = chunk, size + #chunk
  end
  return nil, "toomuchdata"
end

local function from_file(file)
  local parts, size = {}, 0
  while size <= MAX_FILE_BYTES do
    local chunk, word = file:read(65536)
    if chunk == nil then return not word and concat(parts) or nil, word end
    parts[#parts + 1], size = chunk, size + #chunk
  end
  return nil, "toomuchdata"
end

local function from_io(item, fname)
  local path = arg.string(item.path or item.name, "name", fname)
  local file <close>, word = (item.io or ba.openio "home"):open(path)
  if not file then return nil, word end
  return from_file(file)
end

-- The bytes of an attached file. `source` is a string, a source of ltn12, or an open file; without it, the file is read from `io`.
local function content(item, fname)
  local source = item.source
  if source == nil then source = item.data or item.body end
  if source == nil then return from_io(item, fname) end
  local kind, meta = rawtype(source), core.getmetatable(source)
  if kind == "string" then return source end
  if kind == "function" or kind == "table" and meta and meta.__call then return from_source(source, fname) end
  if kind == "userdata" or kind == "table" and rawtype(source.read) == "function" then return from_file(source) end
  core.bad_argument("source", fname, "string, function or file", source)
end

local function text(value, name)
  return arg.optional(arg.string, value, nil, name, "send")
end

-- A file in the form for Python; nil and an error when it can't be read.
local function file_of(item, fname)
  arg.table(item, fname, "send")
  local data, word = content(item, fname)
  if not data then return nil, word end
  local name = text(item.name, "name") or match(text(item.path, "path") or "", "[^/]*$")
  local kind = text(item.content or item.type or item.mime or item.contenttype, "content") or ba.mime(match(name, "%.(%w+)$") or "")
  return {
    name = match(name, "[^/\\]*$"), data = data, type = kind, description = text(item.description, "description"),
    id = text(item.id or item.cid, "id"),
  }
end

-- The files of a list, or of a single item; nil and an error.
local function files_of(value, fname)
  value = arg.optional(arg.table, value, {}, fname, "send")
  local list = (value[1] ~= nil or next(value) == nil) and value or {value}
  local files = {}
  for at, item in ipairs(list) do
    local file, word = file_of(item, fname)
    if not file then return nil, word end
    files[at] = file
  end
  return files
end

-- ---- sending

local function addresses(value, name)
  if core.type(value) ~= "table" then return {text(value, name)} end
  local list = {}
  for at, one in ipairs(value) do list[at] = arg.string(one, name, "send") end
  return list
end

-- The text of a string or of a source of ltn12; nil and an error when the source fails.
local function body(value, name)
  if rawtype(value) == "function" then return from_source(value, name) end
  return text(value, name)
end

-- The mail in the form for Python; nil and an error.
local function fields_of(mail)
  local plain, fault = body(mail.txtbody == nil and mail.body or mail.txtbody, "txtbody")
  if fault then return nil, fault end
  local html, other = body(mail.htmlbody, "htmlbody")
  if other then return nil, other end
  local images, word = files_of(mail.htmlimg, "htmlimg")
  if not images then return nil, word end
  local files, reason = files_of(mail.attach, "attach")
  if not files then return nil, reason end
  return {
    from = arg.string(mail.from, "from", "send"), to = addresses(mail.to, "to"), cc = addresses(mail.cc, "cc"),
    bcc = addresses(mail.bcc, "bcc"), replyto = text(mail.replyto, "replyto"), subject = text(mail.subject, "subject"), text = plain,
    html = html, charset = text(mail.charset, "charset"), encoding = text(mail.encoding, "encoding"), images = images, files = files,
  }
end

-- syntax: mail:send{from, to [, cc, bcc, replyto, subject, txtbody | body, htmlbody, htmlimg, attach, encoding, charset]}
-- -> true [, the refused recipients] | nil, error [, reason]
-- to, cc, bcc: addresses separated by commas, or an array. htmlimg, attach: a file or an array of files, each
-- {source=text | function | file [, name, content, description, id]} or {io=, name=}. The HTML text refers to images by their id.
function methods:send(mail)
  local server = arg.instance(self, class, 1, "send").server
  local fields, word = fields_of(arg.table(mail, 2, "send"))
  if not fields then return nil, word end
  return py.send(core.table_codec.dump(server), core.table_codec.dump(fields))
end

-- syntax: socket.mail{server [, port, user, password, shark, starttls, timeout=ms]} -> mail
local function create(op)
  op = arg.table(op, 1, "mail")
  local server = {
    host = arg.string(op.server, "server", "mail"), port = arg.optional(arg.integer, op.port, nil, "port", "mail"),
    user = arg.optional(arg.string, op.user, nil, "user", "mail"),
    password = arg.optional(arg.string, op.password, nil, "password", "mail"),
    starttls = arg.optional(arg.boolean, op.starttls, nil, "starttls", "mail"),
    timeout_ms = arg.optional(arg.milliseconds, op.timeout, nil, "timeout", "mail"),
    tls = op.shark and core.tls.check(op.shark, "shark", "mail", "client") or nil,
  }
  return setmetatable({server = server, shark = op.shark}, class) -- shark: must not be collected while server.tls is in use
end

socket.mail = create

return create
