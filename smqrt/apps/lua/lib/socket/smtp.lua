-- require "socket.smtp": LuaSocket's SMTP client (RFC 5321; spec: bas-api §12, §17). `socket.mail` is simpler to use.
local core = ...

local arg, char, concat, find, format, gsub, ipairs, lower, match, pairs, raise, rawtype, sub, upper =
  core.arg, string.char, table.concat, string.find, string.format, string.gsub, ipairs, string.lower, string.match, pairs,
  core.raise, core.rawtype, string.sub, string.upper
local socket, mime, ltn12, random, date = socket, mime, require "ltn12", ba.rndbs, os.date

local MAX_LINES <const> = 100 -- of a reply
local MAX_DEPTH <const> = 20  -- of nested parts
local MAX_RECIPIENTS <const> = 100
local EHLO <const> = "EHLO " -- followed by the domain

local smtp = {SERVER = "localhost", PORT = 25, DOMAIN = "localhost", TIMEOUT = 60, ZONE = "-0000"}

-- ---- messages

local function canonic(name)
  return (gsub(name, "%f[%w]%l", upper))
end

local function header_lines(headers)
  local lines = {}
  for name, value in pairs(headers) do
    value = arg.string(value, name, "message")
    if find(name, "[^!-9;-~]") then raise("message: '" .. name .. "' is not a valid header name") end
    if find(gsub(value, "\r?\n[ \t]", " "), "[\r\n]") then raise("message: line end in the header '" .. name .. "'") end
    lines[#lines + 1] = canonic(name) .. ": " .. value .. "\r\n"
  end
  table.sort(lines)
  return concat(lines) .. "\r\n"
end

local function lowered(headers)
  local found = {}
  for name, value in pairs(arg.optional(arg.table, headers, {}, "headers", "message")) do
    found[lower(arg.string(name, "headers", "message"))] = value
  end
  return found
end

local function add(sources, text)
  sources[#sources + 1] = ltn12.source.string(text)
end

local add_part

local function add_parts(sources, headers, body, depth)
  local boundary = "=_" .. gsub(random(16), ".", function(one) return format("%02x", one:byte()) end)
  headers["content-type"] = (headers["content-type"] or "multipart/mixed") .. '; boundary="' .. boundary .. '"'
  add(sources, header_lines(headers))
  if body.preamble then add(sources, arg.string(body.preamble, "preamble", "message") .. "\r\n") end
  for _, part in ipairs(body) do
    add(sources, "\r\n--" .. boundary .. "\r\n")
    add_part(sources, part, depth + 1)
  end
  add(sources, "\r\n--" .. boundary .. "--\r\n\r\n")
  if body.epilogue then add(sources, arg.string(body.epilogue, "epilogue", "message") .. "\r\n") end
end

function add_part(sources, part, depth, headers)
  if depth > MAX_DEPTH then raise("message: parts are nested deeper than " .. MAX_DEPTH) end
  arg.table(part, depth == 0 and 1 or "body", "message")
  headers = headers or lowered(part.headers)
  local body = part.body
  if core.type(body) == "table" then return add_parts(sources, headers, body, depth) end
  headers["content-type"] = headers["content-type"] or 'text/plain; charset="iso-8859-1"'
  add(sources, header_lines(headers))
  if rawtype(body) == "function" then sources[#sources + 1] = body else add(sources, arg.string(body, "body", "message")) end
end

-- syntax: smtp.message{headers = {name = value}, body = text | source | {preamble =, message, ..., epilogue =}} -> source
function smtp.message(message)
  local headers = lowered(arg.table(message, 1, "message").headers)
  headers.date = headers.date or date "!%a, %d %b %Y %H:%M:%S " .. (message.zone or smtp.ZONE)
  headers["mime-version"] = "1.0"
  local sources, at = {}, 1
  add_part(sources, message, 0, headers)
  return function()
    while sources[at] do
      local chunk, word = sources[at]()
      if chunk or word then return chunk, word end
      at = at + 1
    end
    return nil
  end
end

-- ---- transactions

-- Code, lines and last line of a reply; nil and an error.
local function read_reply(tcp)
  local lines = {}
  for at = 1, MAX_LINES do
    local line, word = tcp:receive "*l"
    if not line then return nil, word end
    local code, mark, text = match(line, "^(%d%d%d)([- ]?)(.*)")
    if not code then return nil, "invalid server reply" end
    lines[at] = text
    if mark ~= "-" then return code, lines, line end
  end
  return nil, "invalid server reply"
end

-- Send a line. Returns the lines of the reply when its code begins with `wanted`, else nil and the last line.
local function command(tcp, wanted, line)
  if line then
    local sent, word = tcp:send(line .. "\r\n")
    if not sent then return nil, word end
  end
  local code, lines, last = read_reply(tcp)
  if not code then return nil, lines end
  if sub(code, 1, #wanted) ~= wanted then return nil, last end
  return lines
end

local function mechanisms(features)
  for _, line in ipairs(features) do
    local names = match(upper(line), "^AUTH[ =](.*)")
    if names then return " " .. names .. " " end
  end
  return ""
end

local function login(tcp, features, user, password)
  local offered = mechanisms(features)
  if find(offered, " PLAIN ", 1, true) then return command(tcp, "235", "AUTH PLAIN " .. mime.b64(char(0) .. user .. char(0) .. password)) end
  if not find(offered, " LOGIN ", 1, true) then return nil, "authentication not supported" end
  local done, word = command(tcp, "3", "AUTH LOGIN")
  if done then done, word = command(tcp, "3", mime.b64(user)) end
  if done then done, word = command(tcp, "235", mime.b64(password)) end
  return done, word
end

local function deliver(tcp, mail, recipients)
  local done, word = command(tcp, "2", "MAIL FROM:" .. mail.from)
  for _, one in ipairs(recipients) do
    if done then done, word = command(tcp, "2", "RCPT TO:" .. one) end
  end
  if done then done, word = command(tcp, "3", "DATA") end
  if not done then return nil, word end
  local source = ltn12.source.chain(mail.source, mime.stuff())
  done, word = ltn12.pump.all(source, socket.sink("keep-open", tcp), mail.step)
  if not done then return nil, word end
  done, word = command(tcp, "2", "\r\n.")
  if done then command(tcp, "2", "QUIT") end
  return done and 1 or nil, word
end

local function transact(tcp, mail, recipients)
  local features, word = command(tcp, "220")
  if features then features, word = command(tcp, "2", EHLO .. mail.domain) end
  if not features then return nil, word end
  if mail.user then
    local is_accepted, reply = login(tcp, features, mail.user, mail.password)
    if not is_accepted then return nil, reply end
  end
  return deliver(tcp, mail, recipients)
end

local function one_line(value, index, fname)
  arg.string(value, index, fname)
  if find(value, "%c") then raise("bad argument #" .. index .. " to '" .. fname .. "' (a string without control characters expected)") end
  return value
end

local function recipients_of(rcpt)
  if core.type(rcpt) ~= "table" then rcpt = {rcpt} end
  if #rcpt < 1 or #rcpt > MAX_RECIPIENTS then raise("bad argument #rcpt to 'send' (1 to " .. MAX_RECIPIENTS .. " recipients expected)") end
  local found = {}
  for at, one in ipairs(rcpt) do found[at] = one_line(one, "rcpt", "send") end
  return found
end

-- syntax: smtp.send{from = "<a@b>", rcpt = "<c@d>" | array, source = [, user =, password =, server =, port =, domain =, step =, create =]}
-- -> 1 | nil, error
function smtp.send(mail)
  arg.table(mail, 1, "send")
  local checked = {
    from = one_line(mail.from, "from", "send"), source = arg["function"](mail.source, "source", "send"),
    user = arg.optional(arg.string, mail.user, nil, "user", "send"),
    password = arg.optional(arg.string, mail.password, "", "password", "send"),
    domain = one_line(mail.domain or smtp.DOMAIN, "domain", "send"),
    step = arg.optional(arg["function"], mail.step, nil, "step", "send"),
  }
  local recipients = recipients_of(mail.rcpt)
  local create = arg.optional(arg["function"], mail.create, socket.tcp, "create", "send")
  local tcp, word = create()
  if not tcp then return nil, word end
  tcp:settimeout(smtp.TIMEOUT)
  local done, fault = tcp:connect(mail.server or smtp.SERVER, mail.port or smtp.PORT)
  if done then done, fault = transact(tcp, checked, recipients) end
  tcp:close()
  return done or nil, fault
end

socket.smtp = smtp

return smtp
