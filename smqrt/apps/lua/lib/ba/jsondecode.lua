-- ba.json.decode (spec: bas-api §7).
--
-- In addition to JSON it accepts comments, a comma after the last member of an object, and several documents in one text.
local core, py = ...

local byte, find, gsub, match, sub = string.byte, string.find, string.gsub, string.match, string.sub
local arg, error, pcall, rawtype, tonumber, unpack = core.arg, error, pcall, core.rawtype, tonumber, table.unpack
local concat, isyieldable, maxinteger, utf8_char = table.concat, core.isyieldable, math.maxinteger, utf8.char

local MAX_DEPTH <const> = 1000
local TOKENS_A_TURN <const> = 4096       -- a few ms
local STRING_PIECE_BYTES <const> = 16384 -- of a string with escapes that are replaced at once

-- Lua doubles a table, and its table of all strings, in one step. With this number of values, or of members of an object, that
-- takes 10 to 20 ms.
local MAX_VALUES <const> = py.max_values()
local MAX_MEMBERS <const> = math.max(MAX_VALUES // 4, 1)
core.json_values = MAX_VALUES
local LARGE_BYTES <const> = 1 << 20 -- passing such a text to Lua has used up the time of a turn

-- Error values of the parser: the results after nil.
local PARSE <const>, MORE <const> = {"parse"}, {"needmoredata"}
local TOO_MANY_VALUES <const> = {"mem", "more than " .. MAX_VALUES .. " values: split the document up, or raise json_values"}
local TOO_MANY_MEMBERS <const> = {"mem", "an object with more than " .. MAX_MEMBERS .. " members: split it up, or raise json_values"}

-- Bytes. Lua compiles such constants into the code only when each has a statement of its own.
local QUOTE <const> = 34
local STAR <const> = 42
local COMMA <const> = 44
local SLASH <const> = 47
local COLON <const> = 58
local OPEN_BRACKET <const> = 91
local BACKSLASH <const> = 92
local CLOSE_BRACKET <const> = 93
local OPEN_BRACE <const> = 123
local CLOSE_BRACE <const> = 125

local null, depth_left, longest_name, values_left -- of the text that is being parsed
local tokens_left = TOKENS_A_TURN

--- Lets other activities run, which may decode too, and then restores the state of this one. Does not yield where that is
-- impossible, such as in a sort comparator or a finalizer.
local function pause()
  tokens_left = TOKENS_A_TURN
  if values_left then
    values_left = values_left - TOKENS_A_TURN
    if values_left < 0 then error(TOO_MANY_VALUES, 0) end
  end
  if not isyieldable() then return end
  local own_null, own_depth, own_name, own_left = null, depth_left, longest_name, values_left
  core.pause()
  null, depth_left, longest_name, values_left, tokens_left = own_null, own_depth, own_name, own_left, TOKENS_A_TURN
end

--- Counts a token, and pauses after TOKENS_A_TURN.
local function count()
  tokens_left = tokens_left - 1
  if tokens_left <= 0 then pause() end
end
core.json_count = count

local function comment_end(text, position)
  count()
  local kind = byte(text, position + 1)
  if kind == SLASH then return (find(text, "\n", position + 2, true) or error(MORE, 0)) + 1 end
  if kind == STAR then
    local _, last = find(text, "*/", position + 2, true)
    return (last or error(MORE, 0)) + 1
  end
  error(kind and PARSE or MORE, 0)
end

--- Returns the position of the next token, after white space and comments.
local function skip(text, position)
  while true do
    position = find(text, "[^ \t\r\n]", position) or error(MORE, 0)
    if byte(text, position) ~= SLASH then return position end
    position = comment_end(text, position)
  end
end

local ESCAPES = {b = "\b", f = "\f", n = "\n", r = "\r", t = "\t", ['"'] = '"', ["\\"] = "\\", ["/"] = "/"}

local function surrogate_pair(high, low)
  return utf8_char(0x10000 + ((tonumber(high, 16) - 0xD800) << 10) + tonumber(low, 16) - 0xDC00)
end

local function unescape(letter, rest)
  if letter == "u" then
    local digits = match(rest, "^%x%x%x%x") or error(PARSE, 0)
    return utf8_char(tonumber(digits, 16)) .. sub(rest, 5)
  end
  return (ESCAPES[letter] or error(PARSE, 0)) .. rest
end

local function unescaped(text)
  if find(text, "\\u[dD]", 1) then
    text = gsub(text, "\\u([dD][89abAB]%x%x)\\u([dD][c-fC-F]%x%x)", surrogate_pair)
  end
  return (gsub(text, "\\(.)([^\\]?[^\\]?[^\\]?[^\\]?)", unescape))
end

--- Returns the value of the string whose opening quote is at `position`, and the position after it.
local function parse_string(text, position)
  local last = find(text, '["\\]', position + 1) or error(MORE, 0)
  if byte(text, last) == QUOTE then return sub(text, position + 1, last - 1), last + 1 end
  local from, pieces = position + 1, {}
  while byte(text, last) == BACKSLASH do
    if last - from > STRING_PIECE_BYTES and not find(text, "^\\u[dD][89abAB]%x%x\\u[dD][c-fC-F]", last - 6) then
      pieces[#pieces + 1], from = unescaped(sub(text, from, last - 1)), last
      pause()
    end
    last = find(text, '["\\]', last + 2) or error(MORE, 0)
  end
  pieces[#pieces + 1] = unescaped(sub(text, from, last - 1))
  return concat(pieces), last + 1
end

local function parse_number(text, position)
  local digits, after = match(text, "^(-?%d+%.?%d*[eE]?[+-]?%d*)()", position)
  local value = digits and tonumber(digits)
  if value then return value, after end
  error((after or position + 1) > #text and MORE or PARSE, 0)
end

local function literal(word, value)
  return function(text, position)
    local found = sub(text, position, position + #word - 1)
    if found == word then return value, position + #word end
    error(found == sub(word, 1, #found) and MORE or PARSE, 0)
  end
end

local null_word = literal("null")

local function parse_null(text, position)
  local _, after = null_word(text, position)
  return null, after
end

local parsers = { -- first byte of a value -> its parser
  [QUOTE] = parse_string, [byte"-"] = parse_number, [byte"f"] = literal("false", false), [byte"n"] = parse_null,
  [byte"t"] = literal("true", true),
}
for digit = byte"0", byte"9" do parsers[digit] = parse_number end

local function parse_value(text, position)
  local parser = parsers[byte(text, position)]
  if parser then return parser(text, position) end
  position = skip(text, position)
  return (parsers[byte(text, position)] or error(PARSE, 0))(text, position)
end

local function enter_table()
  if depth_left == 0 then error(PARSE, 0) end
  depth_left = depth_left - 1
end

--- Returns the byte after a value, a comma or closing bracket, and the position after that byte.
local function separator(text, position)
  tokens_left = tokens_left - 1
  if tokens_left <= 0 then pause() end
  local code = byte(text, position)
  if code == COMMA or code == CLOSE_BRACE or code == CLOSE_BRACKET then return code, position + 1 end
  position = skip(text, position)
  return byte(text, position), position + 1
end

parsers[OPEN_BRACKET] = function(text, position)
  enter_table()
  local array, n, code = {}, 0, nil
  position = skip(text, position + 1)
  if byte(text, position) == CLOSE_BRACKET then code, position = CLOSE_BRACKET, position + 1 end
  while code ~= CLOSE_BRACKET do
    n = n + 1
    array[n], position = parse_value(text, position)
    code, position = separator(text, position)
    if code ~= COMMA and code ~= CLOSE_BRACKET then error(PARSE, 0) end
  end
  depth_left = depth_left + 1
  return array, position
end

--- Returns the name of a member and the position of its value; at the end of the object nil and the position after it.
local function member(text, position)
  local name, after = match(text, '^"([^"\\]*)":()', position)
  if name then return name, after end
  position = skip(text, position)
  local code = byte(text, position)
  if code == CLOSE_BRACE then return nil, position + 1 end
  if code ~= QUOTE then error(PARSE, 0) end
  name, position = parse_string(text, position)
  position = skip(text, position)
  if byte(text, position) ~= COLON then error(PARSE, 0) end
  return name, position + 1
end

parsers[OPEN_BRACE] = function(text, position)
  enter_table()
  local object, n, code = {}, 0, COMMA
  position = position + 1
  while code == COMMA do
    local name
    name, position = member(text, position)
    if not name then code = CLOSE_BRACE break end
    if #name > longest_name then error(PARSE, 0) end
    n = n + 1
    if n > MAX_MEMBERS then error(TOO_MANY_MEMBERS, 0) end
    object[name], position = parse_value(text, position)
    code, position = separator(text, position)
  end
  if code ~= CLOSE_BRACE then error(PARSE, 0) end
  depth_left = depth_left + 1
  return object, position
end

--- Returns the position of the next document, after white space and comments; nil at the end of the text.
local function next_document(text, position)
  while true do
    position = find(text, "[^ \t\r\n]", position)
    if not position or byte(text, position) ~= SLASH then return position end
    if sub(text, position, position + 1) == "//" and not find(text, "\n", position, true) then return nil end
    position = comment_end(text, position)
  end
end

local function parse_documents(text)
  local documents, n = {}, 0
  local position = next_document(text, 1) or error(MORE, 0)
  while position do
    local code = byte(text, position)
    if code ~= OPEN_BRACE and code ~= OPEN_BRACKET then error(PARSE, 0) end
    n = n + 1
    count()
    documents[n], position = parsers[code](text, position)
    position = next_document(text, position)
  end
  return documents
end

local function parse_alone(text)
  local value, position = parse_value(text, skip(text, 1))
  if next_document(text, position) then error(PARSE, 0) end
  return value
end

--- Parses with the given options. Returns the result of `parse`, or nil, an error word, and the limit that was reached.
-- Restores the options of the outer call: a finalizer may decode while another text is being parsed.
local function decode_as(parse, text, with_null, max_depth, max_name)
  local outer_null, outer_depth, outer_name, outer_left = null, depth_left, longest_name, values_left
  null, depth_left, longest_name, values_left = nil, max_depth or MAX_DEPTH, max_name or maxinteger, MAX_VALUES
  if with_null then null = ba.json.null end
  if #text > LARGE_BYTES then pause() end
  local ok, documents = pcall(parse, text)
  null, depth_left, longest_name, values_left = outer_null, outer_depth, outer_name, outer_left
  if ok then return documents end
  if rawtype(documents) == "table" then return nil, documents[1], documents[2] end
  error(documents, 0)
end

-- Returns a list of the documents in a text.
local function decode(...) return decode_as(parse_documents, ...) end
core.json_decode = decode

--- Returns the single value of a text, of any kind; null is ba.json.null. On errors nil and the results of decode_as.
function core.json_value(text) return decode_as(parse_alone, text, true) end

--- ba.json.decode(s [,jnull] [,depth [,namelen]]): returns the table of each document in s, or nil, "parse" or "needmoredata".
-- Returns nil, "mem", and the limit that was reached when there are too many values or members.
-- jnull: false makes JSON null nil, otherwise it is ba.json.null. depth: the limit of nested tables. namelen: of bytes in names.
function ba.json.decode(text, jnull, depth, namelen)
  text = arg.string(text, 1, "decode")
  if rawtype(jnull) == "number" then jnull, depth, namelen = true, jnull, depth end
  depth, namelen = arg.optional(arg.integer, depth, nil, 3, "decode"), arg.optional(arg.integer, namelen, nil, 4, "decode")
  local documents, word, limit = decode(text, jnull ~= false, depth, namelen)
  if not documents then return nil, word, limit end
  return unpack(documents)
end
