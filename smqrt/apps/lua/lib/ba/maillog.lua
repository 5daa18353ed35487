-- The e-mail log of mako.conf: mako.log, and the mails of require "log" (spec: bas-api §3, §12, runtime §1.2).
--
-- Log lines are collected and sent as one mail: when they exceed `maxsize`, after `sdelay`, or with `flush`. A mail that can't be
-- sent is retried.
local core, py = ...

local arg, concat, ipairs, pairs, pcall = core.arg, table.concat, ipairs, pairs, pcall
local remove, tostring = table.remove, tostring

local MAX_BYTES <const>, DELAY_S <const> = 8192, 86400 -- defaults of maxsize and sdelay
local MAX_MAILS <const> = 10         -- unsent lines are kept up to 10 times maxsize; then the oldest are dropped
local MIN_BETWEEN_MS <const> = 60000 -- between mails that a full log causes
local EXIT_MS <const> = 5000         -- at shutdown: for the mail that is being sent, and again for the last one

local maillog = {}
core.maillog = maillog

local lines, size, dropped = {}, 0, 0
local subject, last_ms, is_sending, is_failing
local timer, sender

-- ---- the configuration

local function field(smtp, name, kind)
  if smtp[name] ~= nil and core.type(smtp[name]) ~= kind then core.raise("mako.conf: log.smtp." .. name .. " must be a " .. kind) end
  return smtp[name]
end

-- Returns the table `log` of mako.conf and its table `smtp`; nil when one is missing.
local function configured()
  local log = core.loadconf and core.loadconf.get().log
  if core.type(log) ~= "table" or core.type(log.smtp) ~= "table" then return nil end
  return log, log.smtp
end

local function server_of(smtp, timeout_ms)
  local consec = field(smtp, "consec", "string")
  if consec and consec ~= "tls" and consec ~= "starttls" then core.raise('mako.conf: log.smtp.consec must be "tls" or "starttls"') end
  local has_login = smtp.useauth ~= false
  return socket.mail{
    server = field(smtp, "server", "string") or core.raise("mako.conf: log.smtp.server is missing"), port = field(smtp, "port", "number"),
    user = has_login and field(smtp, "user", "string") or nil, password = has_login and field(smtp, "password", "string") or nil,
    shark = consec and ba.sharkclient() or nil, starttls = consec == "starttls" or nil, timeout = timeout_ms,
  }
end

-- ---- require "log"

local function with_signature(text, log)
  if not log.signature then return text end
  return text .. "\r\n\r\n" .. tostring(log.signature)
end

-- syntax: log.sendmail(text | fields of mail:send) -> true | nil, error [, reason]
-- Missing fields are taken from mako.conf: from, to, subject.
function maillog.sendmail(mail, timeout_ms)
  if core.type(mail) == "string" then mail = {txtbody = mail} end
  arg.table(mail, 1, "sendmail")
  local log, smtp = configured()
  if not log then return nil, "failed", "mako.conf has no table log.smtp" end
  local fields = {from = smtp.from, to = smtp.to, subject = smtp.subject or "Log of the server"}
  for name, value in pairs(mail) do fields[name] = value end
  if not (fields.from and fields.to) then return nil, "failed", "mako.conf: log.smtp.from and log.smtp.to are missing" end
  if not fields.txtbody and fields.body then fields.txtbody = fields.body end
  if fields.txtbody then fields.txtbody = with_signature(tostring(fields.txtbody), log) end
  return server_of(smtp, timeout_ms):send(fields)
end

-- ---- collected lines

local function take_text()
  local text = concat(lines)
  if dropped > 0 then text = "(" .. dropped .. " older entries were left out)\n" .. text end
  lines, size = {}, 0
  return text
end

-- Traces the first of several failures.
local function report_failure(ok, word, reason)
  if not ok and not is_failing then tracep(false, 2, "mako.log: mail not sent: " .. tostring(word) .. " " .. tostring(reason or "")) end
  is_failing = not ok
end

local function max_bytes(log)
  local bytes = core.rawtype(log.maxsize) == "number" and log.maxsize or MAX_BYTES
  return bytes > 0 and bytes or MAX_BYTES
end

local function trim(log)
  local max_size = MAX_MAILS * max_bytes(log)
  while size > max_size and lines[2] do
    size, dropped = size - #lines[1], dropped + 1
    remove(lines, 1)
  end
end

-- Sends the collected lines; lines that can't be sent are put back in front.
local function send(timeout_ms)
  if is_sending or not lines[1] then return end
  is_sending, last_ms = true, core.clock()
  local dropped_before, title = dropped, subject
  local text = take_text()
  dropped, subject = 0, nil
  local done, ok, word, reason = pcall(maillog.sendmail, {txtbody = text, subject = title}, timeout_ms)
  is_sending = false
  if not done then ok, word = nil, ok end
  if not ok then
    table.insert(lines, 1, text)
    size, dropped, subject = size + #text, dropped + dropped_before, subject or title
    local log = configured()
    if log then trim(log) end
    timer:set(10 * MIN_BETWEEN_MS, true)
  end
  report_failure(ok, word, reason)
end

local function send_later()
  sender = sender or ba.thread.create()
  sender:run(send)
end

local function schedule(log, is_flush)
  local is_full = size >= max_bytes(log)
  if is_flush or is_full and (not last_ms or core.clock() - last_ms >= MIN_BETWEEN_MS) then return send_later() end
  local delay_ms = (core.rawtype(log.sdelay) == "number" and log.sdelay or DELAY_S) * 1000
  if is_full then
    timer:set(MIN_BETWEEN_MS, true)
  elseif #lines == 1 then
    timer:set(delay_ms, true)
  end
end

local function add(log, text, op)
  if op.subject then subject = op.subject end
  if text:sub(-1) ~= "\n" then text = text .. "\n" end
  if op.ts then text = ba.datetime "NOW":tostring() .. " " .. text end
  text = text:sub(1, MAX_MAILS * max_bytes(log))
  lines[#lines + 1], size = text, size + #text
  trim(log)
  schedule(log, op.flush)
end

timer = ba.timer(send_later)

-- syntax: mako.log(text [, {flush=false, ts=false, subject=}]) -> true | false without a log in mako.conf
-- flush: send the mail now. ts: begin the entry with the time. subject: of the mail.
function mako.log(text, op)
  text = arg.string(text, 1, "log")
  op = arg.optional(arg.table, op, {}, 2, "log")
  for _, name in ipairs{"flush", "ts"} do arg.optional(arg.boolean, op[name], nil, name, "log") end
  arg.optional(arg.string, op.subject, nil, "subject", "log")
  local log = configured()
  if not log then return false end
  add(log, text, op)
  return true
end

-- With log.logerr, errors of pages are logged as well.
local report = core.report_error

function core.report_error(message, env)
  local log = configured()
  if log and log.logerr then add(log, core.describe(message), {ts = true}) end
  return report(message, env)
end

-- At shutdown: waits for the mail that is being sent, then sends the remaining lines.
py.attach(core.ref(function()
  local until_ms = core.clock() + EXIT_MS
  while is_sending and core.clock() < until_ms do core.sleep(10) end
  send(EXIT_MS)
end))
