-- ba.json.parser: JSON documents that arrive in pieces (spec: bas-api §7).
--
-- Only the ends of documents are searched in arriving pieces, so each byte is examined once, also in small pieces.
-- The first piece of a document is parsed as well: invalid JSON is reported immediately, not when the brackets close.
local core = ...

local arg, byte, concat, count, decode = core.arg, string.byte, table.concat, core.json_count, core.json_decode
local find, match, setmetatable, sub, unpack = string.find, string.match, setmetatable, string.sub, table.unpack

local methods = {}
local Parser = core.class("jsonparser", methods)

local MAX_DOCUMENT_BYTES <const> = 16 << 20 -- whoever sends them must not fill the memory
local LOOKED_AT_BYTES <const> = 16384       -- of the first piece of a document, at once
local MAX_DOCUMENTS <const> = 100000        -- of a piece: the maximum number of results of a call

local function reset(parser)
  parser.pieces, parser.bytes, parser.depth, parser.state = {}, 0, 0, "open"
end

--- ba.json.parser([jnull]): parser:parse(piece) takes documents as they arrive.
function ba.json.parser(jnull)
  local parser = setmetatable({with_null = jnull ~= false}, Parser)
  reset(parser)
  return parser
end

-- Where a piece may end, and what to look for there.
local NEXT = {open = '["{}%[%]/]', string = '["\\]', line = "\n", block = "*", slash = "", star = "", escape = ""}

local steps = {}

function steps.open(parser, code)
  if code == 34 then return "string" end
  if code == 47 then return "slash" end
  if code == 123 or code == 91 then parser.depth = parser.depth + 1 else parser.depth = parser.depth - 1 end
  return "open"
end

function steps.string(_, code) return code == 34 and "open" or "escape" end
function steps.escape() return "string" end
function steps.slash(_, code) return code == 47 and "line" or code == 42 and "block" or nil end
function steps.line() return "open" end
function steps.block() return "star" end
function steps.star(_, code) return code == 47 and "open" or code == 42 and "star" or "block" end

local function find_next(text, state, position)
  local what = NEXT[state]
  if what == "" then return position <= #text and position or nil end
  return find(text, what, position, state == "line" or state == "block")
end

--- The position of the byte that ends the document, nil when the end is not in the text, false when it can't be JSON.
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

--- The values of the documents that end in `text`, and the rest of it; nil and a word for what is not JSON.
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

local function can_begin(rest)
  if #rest > LOOKED_AT_BYTES then return true end
  local _, word = decode(rest, true)
  return word ~= "parse"
end

--- parser:parse(piece [,all]): true as long as a document is not complete, then true and the value of each complete one.
-- all: the values are returned in one table. Returns nil, "parse" for what is not JSON, and nil, "mem" when a document grows beyond
-- MAX_DOCUMENT_BYTES or a table in it beyond what `decode` takes, or when a piece ends more than MAX_DOCUMENTS; the parser can be used again then.
function methods:parse(piece, all)
  local parser = arg.instance(self, Parser, 1, "parse")
  local values, rest = documents_of(parser, arg.string(piece, 2, "parse"))
  if not values then
    reset(parser)
    return nil, rest
  end
  local goes_on = parser.pieces[1]
  if goes_on or match(rest, "[^ \t\r\n]") then
    if not goes_on and not can_begin(rest) then
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
