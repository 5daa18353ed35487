-- The module and global `mime`: transfer encodings and line ends (RFC 2045, RFC 5321 §4.5.2), as step functions and as filters
-- of ltn12 (spec: bas-api §12, §17).
--
-- A step function gets the rest of the previous step, and a chunk, or nil at the end. It returns its output and the new rest.
local core = ...

local arg, byte, char, concat, find, format, gsub = core.arg, string.byte, string.char, table.concat, string.find, string.format, string.gsub
local b64encode, b64decode, gmatch, match, max = ba.b64encode, ba.b64decode, string.gmatch, string.match, math.max
local rawtype, rep, sub, tonumber = core.rawtype, string.rep, string.sub, tonumber

local CRLF <const> = "\r\n"
local LINE_BYTES <const> = 76 -- RFC 2045 §6.7

local mime = {_VERSION = "MIME 1.0.3"}

-- The results of the last step.
local function last(output)
  return output ~= "" and output or nil, nil
end

local function text_of(value, index, fname)
  return arg.optional(arg.string, value, nil, index, fname)
end

-- ---- Base64

-- syntax: mime.b64(rest, chunk) -> encoded, rest
function mime.b64(rest, chunk)
  rest = text_of(rest, 1, "b64")
  if not rest then return nil, nil end
  if chunk == nil then return last(b64encode(rest)) end
  local all = rest .. arg.string(chunk, 2, "b64")
  local whole = #all - #all % 3
  return b64encode(sub(all, 1, whole)), sub(all, whole + 1)
end

-- syntax: mime.unb64(rest, chunk) -> decoded, rest
function mime.unb64(rest, chunk)
  rest = text_of(rest, 1, "unb64")
  if not rest then return nil, nil end
  if chunk == nil then return last(b64decode(rest)) end
  local digits = gsub(rest .. arg.string(chunk, 2, "unb64"), "[^%w+/]", "")
  local whole = #digits - #digits % 4
  return b64decode(sub(digits, 1, whole)), sub(digits, whole + 1)
end

-- ---- quoted-printable

local QUOTED = {}
for code = 0, 255 do
  local one = char(code)
  QUOTED[one] = find(one, "[!-<>-~ \t]") and one or format("=%02X", code)
end

local function quoted_end(white) return format("=%02X", byte(white)) end

-- Encode whole lines. `text` must not end within a possible line end, nor in white space that a line end may follow.
local function quoted(text, marker)
  local lines, at = {}, 1
  while true do
    local stop = find(text, CRLF, at, true)
    local line = gsub(sub(text, at, stop and stop - 1), ".", QUOTED)
    if stop then line = gsub(line, "[ \t]$", quoted_end) end
    lines[#lines + 1] = line
    if not stop then return concat(lines, marker) end
    at = stop + 2
  end
end

-- syntax: mime.qp(rest, chunk [, marker="\r\n"]) -> encoded, rest       marker: replaces line ends; "=0D=0A" for binary data
function mime.qp(rest, chunk, marker)
  rest, marker = text_of(rest, 1, "qp"), arg.optional(arg.string, marker, CRLF, 3, "qp")
  if not rest then return nil, nil end
  if chunk == nil then return last((gsub(quoted(rest, marker), "[ \t]$", quoted_end))) end
  local all = rest .. arg.string(chunk, 2, "qp")
  local pending = match(all, "[ \t]?\r?$") -- may belong to a line end
  return quoted(sub(all, 1, #all - #pending), marker), pending
end

local function unquoted(hex) return char(tonumber(hex, 16)) end

-- syntax: mime.unqp(rest, chunk) -> decoded, rest
function mime.unqp(rest, chunk)
  rest = text_of(rest, 1, "unqp")
  if not rest then return nil, nil end
  local all, pending = rest .. (arg.optional(arg.string, chunk, "", 2, "unqp")), ""
  if chunk then
    pending = match(all, "=[%x \t\r]?[ \t\r]?$") or ""
    all = sub(all, 1, #all - #pending)
  end
  local decoded = gsub(gsub(all, "=[ \t]?[ \t]?\r?\n", ""), "=(%x%x)", unquoted)
  if chunk == nil then return last(decoded) end
  return decoded, pending
end

-- ---- lines

-- `piece` with line ends, and the bytes left on its last line. left: bytes left on the line before it.
-- soft: the line end. unit: nil, or a function that returns the last place for a cut; then one byte is reserved for `soft`.
local function wrap_line(piece, left, length, soft, unit)
  local parts, at, spare = {}, 1, unit and 1 or 0
  left = max(left, 0)
  while true do
    local stop = max(at + left - 1 - spare, at - 1)
    if stop >= #piece then
      parts[#parts + 1] = sub(piece, at)
      return concat(parts), left - (#piece - at + 1)
    end
    if unit then stop = unit(piece, at, stop) end
    parts[#parts + 1] = sub(piece, at, stop) .. soft
    at, left = stop + 1, length
  end
end

local function wrap_text(left, text, length, soft, unit)
  local parts = {}
  for line, stop in gmatch(text, "([^\n]*)(\n?)") do
    local wrapped_line
    wrapped_line, left = wrap_line(gsub(line, "\r", ""), left, length, soft, unit)
    parts[#parts + 1] = wrapped_line
    if stop ~= "" then
      parts[#parts + 1] = CRLF
      left = length
    end
  end
  return concat(parts), left
end

-- syntax: mime.wrp(left, text [, length=76]) -> text in lines, left       left: bytes left on the current line
function mime.wrp(left, text, length)
  left, length = arg.integer(left, 1, "wrp"), arg.optional(arg.positive, length, LINE_BYTES, 3, "wrp")
  if text == nil then return left < length and CRLF or nil, length end
  return wrap_text(left, arg.string(text, 2, "wrp"), length, CRLF)
end

-- The last place up to `stop` that is not within "=XX".
local function before_escape(piece, at, stop)
  for place = stop, max(stop - 1, at), -1 do
    if sub(piece, place, place) == "=" then return place - 1 end
  end
  return stop
end

-- syntax: mime.qpwrp(left, text [, length=76]) -> text in lines with soft line ends, left
function mime.qpwrp(left, text, length)
  left, length = arg.integer(left, 1, "qpwrp"), arg.optional(arg.positive, length, LINE_BYTES, 3, "qpwrp")
  if length < 4 then core.raise("bad argument #3 to 'qpwrp' (a length above 3 expected)") end
  if text == nil then return left < length and "=" .. CRLF or nil, length end
  return wrap_text(left, arg.string(text, 2, "qpwrp"), length, "=" .. CRLF, before_escape)
end

-- The number of line ends in a sequence of CR and LF, and its last character when that may be half of a pair, else 0.
-- half: the second result for the text before it.
local function line_ends(sequence, half)
  local count = 0
  for at = 1, #sequence do
    local code = byte(sequence, at)
    if half ~= 0 and code ~= half then
      half = 0
    else
      count, half = count + 1, code
    end
  end
  return count, half
end

-- syntax: mime.eol(half, text [, marker="\r\n"]) -> text, half       replaces every line end by the marker; half: 0 at the start
function mime.eol(half, text, marker)
  half, marker = arg.integer(half, 1, "eol"), arg.optional(arg.string, marker, CRLF, 3, "eol")
  if text == nil then return nil, 0 end
  local output = gsub(arg.string(text, 2, "eol"), "()([\r\n]+)()", function(first, sequence, after)
    local count, rest = line_ends(sequence, first == 1 and half or 0)
    if after > #text then half = rest else half = 0 end
    return rep(marker, count)
  end)
  if not find(text, "[\r\n]$") and text ~= "" then half = 0 end
  return output, half
end

-- syntax: mime.dot(state, text) -> text, state       doubles dots at the beginning of lines; state: 2 at the start
function mime.dot(state, text)
  state = arg.integer(state, 1, "dot")
  if text == nil then return nil, 2 end
  text = arg.string(text, 2, "dot")
  if text == "" then return "", state end
  local before = state == 2 and CRLF or state == 1 and "\r" or ""
  local all = before .. text
  local stuffed = gsub(all, "\r\n%.", "\r\n..")
  return sub(stuffed, #before + 1), match(all, "\r\n$") and 2 or match(all, "\r$") and 1 or 0
end

-- ---- filters

local function cycle(low, context, extra) return require "ltn12".filter.cycle(low, context, extra) end

local function choice(table_of, default, what)
  return function(name, ...)
    name = arg.optional(arg.string, name, default, 1, what)
    local make = table_of[name or ""]
    if not make then core.raise("unknown encoding '" .. (name or "") .. "' for mime." .. what .. ": base64 or quoted-printable") end
    return make(...)
  end
end

-- syntax: mime.encode("base64") | mime.encode("quoted-printable" [, "text" | "binary"]) -> filter
mime.encode = choice({
  base64 = function() return cycle(mime.b64, "") end,
  ["quoted-printable"] = function(mode) return cycle(mime.qp, "", mode == "binary" and "=0D=0A" or CRLF) end,
}, nil, "encode")

-- syntax: mime.decode("base64" | "quoted-printable") -> filter
mime.decode = choice({
  base64 = function() return cycle(mime.unb64, "") end,
  ["quoted-printable"] = function() return cycle(mime.unqp, "") end,
}, nil, "decode")

local function wrapping(low)
  return function(length)
    length = arg.optional(arg.positive, length, LINE_BYTES, 2, "wrap")
    return cycle(low, length, length)
  end
end

local wraps = {base64 = wrapping(mime.wrp), ["quoted-printable"] = wrapping(mime.qpwrp)}
wraps.text, wraps.default = wraps.base64, wraps.base64
local wrap = choice(wraps, "text", "wrap")

-- syntax: mime.wrap(["text" | "base64" | "quoted-printable"] [, length]) -> filter
function mime.wrap(name, length)
  if rawtype(name) == "number" then name, length = nil, name end
  return wrap(name, length)
end

-- syntax: mime.normalize([marker]) -> filter       replaces line ends
function mime.normalize(marker) return cycle(mime.eol, 0, marker) end

-- syntax: mime.stuff() -> filter       doubles dots at the beginning of lines
function mime.stuff() return cycle(mime.dot, 2) end

_G.mime = mime

return mime
