-- ba.json.parser: JSON documents that arrive in pieces (spec: bas-api §7).
--
-- Pieces are searched only for the end of the document, so that each byte is examined once even in small pieces.
-- The first piece of a document is parsed as well: invalid JSON is reported immediately, not when the brackets close.
local core = ...

local arg, byte, concat, count, decode = core.arg, string.byte, table.concat, core.json_count, core.json_decode
local find, match, setmetatable, sub, unpack = string.find, string.match, setmetatable, string.sub, table.unpack

local methods = {}
local Parser = core.class("jsonparser", methods)

local MAX_DOCUMENT_BYTES <const> = 16 << 20 -- the sender must not fill the memory
local MAX_CHECKED_BYTES <const> = 16384     -- longer first pieces of a document are not parsed at once
local MAX_DOCUMENTS <const> = 100000        -- of a piece: Lua limits the results of a call

-- Bytes, see jsondecode.lua
local QUOTE <const> = 34
local STAR <const> = 42
local SLASH <const> = 47
local OPEN_BRACKET <const> = 91
local OPEN_BRACE <const> = 123

local function reset(parser)
  parser.pieces, parser.bytes, parser.depth, parser.state = {}, 0, 0, "open"
end

--- ba.json.parser([jnull]): returns a parser; parser:parse(piece) takes documents as they arrive.
function ba.json.parser(jnull)
  local parser = setmetatable({with_null = jnull ~= false}, Parser)
  reset(parser)
  return parser
end

-- State -> pattern of the next byte that changes it; "": any byte.
local PATTERNS <const> = {open = '["{}%[%]/]', string = '["\\]', line = "\n", block = "*", slash = "", star = "", escape = ""}

local steps = {}

function steps.open(parser, code)
  if code == QUOTE then return "string" end
  if code == SLASH then return "slash" end
  if code == OPEN_BRACE or code == OPEN_BRACKET then parser.depth = parser.depth + 1 else parser.depth = parser.depth - 1 end
  return "open"
end

function steps.string(_, code) return code == QUOTE and "open" or "escape" end
function steps.escape() return "string" end
function steps.slash(_, code) return code == SLASH and "line" or code == STAR and "block" or nil end
function steps.line() return "open" end
function steps.block() return "star" end
function steps.star(_, code) return code == SLASH and "open" or code == STAR and "star" or "block" end

local function find_next(text, state, position)
  local pattern = PATTERNS[state]
  if pattern == "" then return position <= #text and position or nil end
  return find(text, pattern, position, state == "line" or state == "block")
end

--- Returns the position of the last byte of the document, nil when the end is not in the text, false when it can't be JSON.
local function end_of_document(parser, text, position)
  while true do
    position = find_next(text, parser.state, position)
    if not position then return nil end
    count()
    parser.state = steps[parser.state](parser, byte(text, position))
    if not parser.state or parser.depth < 0 then return false end
    position = position + 1
    if parser.depth == 0 and parser.state == "open" and find(text, "^[}%]]", position - 1) then return position - 1 end
  end
end

--- Returns the values of the documents that end in `text`, and the rest of it; nil and an error word for invalid JSON.
local function documents_of(parser, text)
  local values, from = {}, 1
  while true do
    if not parser.pieces[1] and find(text, "^[ \t\r\n]*[^ \t\r\n%[{/]", from) then return nil, "parse" end
    local last = end_of_document(parser, text, from)
    if last == false then return nil, "parse" end
    if not last then return values, sub(text, from) end
    parser.pieces[#parser.pieces + 1] = sub(text, from, last)
    local documents, word = decode(concat(parser.pieces), parser.with_null)
    if not documents then return nil, word == "mem" and word or "parse" end
    if #values == MAX_DOCUMENTS then return nil, "mem" end
    values[#values + 1] = documents[1]
    reset(parser)
    from = last + 1
  end
end

-- Whether a document can begin with `rest`.
local function can_begin(rest)
  if #rest > MAX_CHECKED_BYTES then return true end
  local _, word = decode(rest, true)
  return word ~= "parse"
end

--- parser:parse(piece [,all]): returns true, and the value of each document that the piece completes.
-- all: returns the values in one table. Returns nil, "parse" for invalid JSON. Returns nil, "mem" for a document longer than
-- MAX_DOCUMENT_BYTES or beyond the limits of `decode`, and for a piece that completes more than MAX_DOCUMENTS. After an error the
-- parser can be used again.
function methods:parse(piece, all)
  local parser = arg.instance(self, Parser, 1, "parse")
  local values, rest = documents_of(parser, arg.string(piece, 2, "parse"))
  if not values then
    reset(parser)
    return nil, rest
  end
  local is_continued = parser.pieces[1]
  if is_continued or match(rest, "[^ \t\r\n]") then
    if not is_continued and not can_begin(rest) then
      reset(parser)
      return nil, "parse"
    end
    parser.pieces[#parser.pieces + 1], parser.bytes = rest, parser.bytes + #rest
    if parser.bytes > MAX_DOCUMENT_BYTES then
      reset(parser)
      return nil, "mem"
    end
  end
  if #values == 0 then return true end
  if all then return true, values end
  return true, unpack(values)
end
