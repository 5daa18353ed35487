-- require "serpent": serialization of values as Lua source text (spec: bas-api §12, §17).
--
-- A table or function is written once. Where it occurs again, `nil` is written, and `dump` adds an assignment after the main text.
local core = ...

local arg, concat, find, format, gsub, ipairs = core.arg, table.concat, string.find, string.format, string.gsub, ipairs
local kind_of, mathtype, next, pairs, rawtype = core.type, math.type, next, pairs, core.rawtype
local rep, setmetatable, sort, tonumber, tostring = string.rep, setmetatable, table.sort, tonumber, tostring
local error, getmetatable, load, pcall, raise, remove = error, core.getmetatable, load, pcall, core.raise, table.remove

local HUGE <const> = math.huge
local MAX_DEPTH <const> = 150 -- of nested tables: each level is a call, and copies the text of the inner ones

local KEYWORDS = {}
for word in ("and break do else elseif end false for function goto if in local nil not or repeat return then true until while"):gmatch"%a+" do
  KEYWORDS[word] = true
end

-- ---- values other than tables

local GLOBAL_NAMES = {} -- function of Lua's libraries -> its name
for _, library in ipairs{"_G", "coroutine", "debug", "io", "math", "string", "table", "os", "utf8"} do
  for name, value in pairs(_G[library] or {}) do
    if rawtype(value) == "function" then
      GLOBAL_NAMES[value] = GLOBAL_NAMES[value] or (library == "_G" and name or library .. "." .. name)
    end
  end
end

local function quoted(text)
  return (gsub(gsub(format("%q", text), "\\\n", "\\n"), "\r", "\\r"))
end

-- The shortest text that is read as the same number.
local function digits(number)
  for precision = 14, 17 do
    local text = format("%." .. precision .. "g", number)
    if tonumber(text) == number then return find(text, "[%.eEn]") and text or text .. ".0" end
  end
end

local function formatted(pattern, number)
  local done, text = pcall(format, pattern, number)
  return done and text or raise("bad option 'numformat': " .. text)
end

local function number_text(number, op)
  if mathtype(number) == "integer" then return format(number == math.mininteger and "0x%x" or "%d", number) end
  if not op.nohuge then
    if number ~= number then return "0/0" end
    if number == HUGE or number == -HUGE then
      local sign = number < 0 and "-" or ""
      return sign .. "1/0" .. (op.comment and " --[[" .. sign .. "math.huge]]" or "")
    end
  end
  local text = op.numformat and formatted(op.numformat, number) or digits(number) or tostring(number)
  return op.fixradix and gsub(text, ",", ".") or text
end

-- ---- keys

local function is_name(key)
  return rawtype(key) == "string" and find(key, "^[%a_][%w_]*$") and not KEYWORDS[key]
end

local ORDER <const> = {number = "1", string = "2"}

-- The sort key of a table key: numbers before texts, and numbers within texts by their value.
local function sort_text(key)
  local text = gsub(tostring(key), "0*(%d+)", function(found) return format("%03d", #found % 1000) .. found end)
  return (ORDER[rawtype(key)] or "3") .. text .. "\0" .. tostring(key)
end

local function by_number_or_text(texts)
  return function(a, b)
    if rawtype(a) == "number" and rawtype(b) == "number" then return a < b end
    return texts[a] < texts[b]
  end
end

local function sorted(keys, op, of)
  if rawtype(op.sortkeys) == "function" then
    op.sortkeys(keys, of)
  elseif op.sortkeys then
    local texts = {}
    for _, key in ipairs(keys) do texts[key] = sort_text(key) end
    sort(keys, by_number_or_text(texts))
  end
  return keys
end

-- ---- tables

local put

local function comment_on(op, value, level)
  local shown = op.comment
  if not shown or rawtype(shown) == "number" and level >= shown then return "" end
  return " --[[" .. gsub(tostring(value), "%]%]", "] ]") .. "]]"
end

-- Text for a function, thread or userdata.
local function opaque(state, value, level)
  local op, name = state.op, GLOBAL_NAMES[value]
  if name then return name .. comment_on(op, value, level) end
  if op.fatal and not (rawtype(value) == "function" and op.nocode) then raise("serpent: can't serialize a " .. kind_of(value)) end
  if rawtype(value) == "function" then return "function() --[[..skipped..]] end" .. comment_on(op, value, level) end
  return quoted(tostring(value)) .. comment_on(op, value, level)
end

local function key_text(state, key, path, level)
  if is_name(key) then return key, path .. "." .. key end
  local text = put(state, key, path, level, "")
  return "[" .. text .. "]", path .. "[" .. text .. "]"
end

local function is_left_out(op, key, value)
  return op.valignore and op.valignore[value]
    or op.keyallow and not op.keyallow[key]
    or op.keyignore and op.keyignore[key]
    or op.valtypeignore and op.valtypeignore[kind_of(value)]
end

-- Add an assignment after the main text; only in `dump`.
local function assign_late(state, path, value)
  local late = state.late
  if late then late[#late + 1] = path .. state.space .. "=" .. state.space .. value end
end

-- The number of elements that are written without a key; with `sparse` those before the first nil.
local function count_of(value, op)
  local count = #value
  if op.maxnum and count > op.maxnum then count = op.maxnum end
  if op.sparse then
    for at = 1, count do
      if value[at] == nil then return at - 1 end
    end
  end
  return count
end

local function is_element(key, count)
  return mathtype(key) == "integer" and key >= 1 and key <= count
end

-- The keys in the order in which they are written, and the number of those that are written without a key.
local function keys_of(value, op)
  local by_function, keys, others = rawtype(op.sortkeys) == "function", {}, {}
  local count = by_function and 0 or count_of(value, op)
  for at = 1, count do keys[at] = at end
  for key in next, value do
    if not is_element(key, count) then others[#others + 1] = key end
  end
  for at, key in ipairs(sorted(others, op, value)) do
    if op.maxnum and count + at > op.maxnum then break end
    keys[count + at] = key
  end
  return keys, count
end

local function put_item(state, table, key, count, path, level)
  local value, space = table[key], state.space
  if is_element(key, count) then return put(state, value, path .. "[" .. key .. "]", level, "") end
  if rawtype(key) == "table" and state.late then -- has a name only after the main text
    state.keys[#state.keys + 1] = {key = key, value = value, path = path}
    return nil
  end
  local name, slot = key_text(state, key, path, level)
  return put(state, value, slot, level, name .. space .. "=" .. space)
end

local function items_of(state, table, path, level)
  local op, items, length = state.op, {}, 0
  local keys, count = keys_of(table, op)
  for _, key in ipairs(keys) do
    local item = not is_left_out(op, key, table[key]) and put_item(state, table, key, count, path, level)
    if item then
      items[#items + 1], length = item, length + #item
      if op.maxlength and length >= op.maxlength then break end
    end
  end
  return items
end

local function put_table(state, table, path, level, tag)
  local op = state.op
  if op.maxlevel and level >= op.maxlevel then return tag .. "{}" .. comment_on(op, "maxlvl", level) end
  if level >= MAX_DEPTH then raise("serpent: tables are nested deeper than " .. MAX_DEPTH) end
  local items = items_of(state, table, path, level + 1)
  local indent = op.indent
  local head, between, tail = "{", "," .. state.space, "}"
  if indent and #items > 0 then
    local inner = "\n" .. rep(indent, level + 1)
    head, between, tail = "{" .. inner, "," .. inner, "\n" .. rep(indent, level) .. "}"
  end
  local body = concat(items, between)
  local text = op.custom and op.custom(tag, head, body, tail, level) or tag .. head .. body .. tail
  return text .. comment_on(op, table, level)
end

-- The result of a table's metamethod __serialize or __tostring, else the table.
local function replaced(value, op)
  local meta = getmetatable(value)
  if rawtype(meta) ~= "table" or op.metatostring == false then return value end
  if meta.__serialize then return meta.__serialize(value) end
  return meta.__tostring and meta.__tostring(value) or value
end

local SIMPLE <const> = {string = quoted, number = number_text, boolean = tostring, ["nil"] = tostring}

-- The text of a value, preceded by `tag`, which is its key and "=" within a table. path: an expression for its place.
function put(state, value, path, level, tag)
  local op, kind = state.op, rawtype(value)
  if SIMPLE[kind] then return tag .. SIMPLE[kind](value, op) end
  local seen = state.seen[value]
  if seen then
    assign_late(state, path, seen)
    return tag .. "nil" .. comment_on(op, "ref", level)
  end
  state.seen[value] = path
  if kind ~= "table" then return tag .. opaque(state, value, level) end
  local other = replaced(value, op)
  if rawtype(other) == "table" then return put_table(state, other, path, level, tag) end
  return put(state, other, path, level, tag) .. comment_on(op, "meta", level)
end

-- Write `value` after the main text, before assignments of its parts.
local function put_late(state, slot, value)
  local late, space = state.late, state.space
  local at = #late + 1
  late[at] = ""
  local is_known = state.seen[value]
  local text = put(state, value, slot, 0, "")
  if is_known then
    remove(late, at) -- `put` has added the assignment
  else
    late[at] = slot .. space .. "=" .. space .. text
  end
end

-- Write the items whose keys are tables. The keys are stored in a separate table, where they have names.
local function put_late_keys(state, path)
  local at = 0
  if state.keys[1] then assign_late(state, "local " .. path .. "k", "{}") end
  while state.keys[at + 1] do
    at = at + 1
    local entry = state.keys[at]
    local name = state.seen[entry.key]
    if not name then
      name = path .. "k[" .. at .. "]"
      put_late(state, name, entry.key)
    end
    put_late(state, entry.path .. "[" .. name .. "]", entry.value)
  end
end

-- ---- the module

local function serialize(value, op)
  local name = op.name
  local state = {op = op, seen = {}, late = name and {}, keys = {}, space = op.compact and "" or " "}
  local text = put(state, value, name or "", 0, "")
  if not name then return text end
  put_late_keys(state, name)
  local late = state.late
  late[#late + 1] = ""
  local between = op.indent and ";\n" or op.compact and ";" or "; "
  return "do local " .. name .. state.space .. "=" .. state.space .. text .. between .. concat(late, between) .. "return " .. name
    .. (op.compact and ";" or "; ") .. "end"
end

local OPTIONS <const> = {
  indent = "string", numformat = "string", name = "string", maxlevel = "number", maxnum = "number", maxlength = "number",
  keyallow = "table", keyignore = "table", valignore = "table", valtypeignore = "table", custom = "function",
}

local function options(op, defaults, fname)
  local all = setmetatable({}, {__index = defaults})
  for name, value in pairs(arg.optional(arg.table, op, {}, 2, fname)) do
    local kind = OPTIONS[name]
    if kind and value then value = arg[kind](value, name, fname) end
    all[name] = value
  end
  if all.name and not is_name(all.name) then raise("bad argument #2 to '" .. fname .. "' (name: a Lua name expected)") end
  return all
end

local serpent = {_NAME = "serpent"}

-- syntax: serpent.line(value [, options]) -> string        on one line
function serpent.line(value, op)
  return serialize(value, options(op, {sortkeys = true, comment = true}, "line"))
end

-- syntax: serpent.block(value [, options]) -> string       indented, one element per line
function serpent.block(value, op)
  return serialize(value, options(op, {indent = "  ", sortkeys = true, comment = true}, "block"))
end

-- syntax: serpent.dump(value [, options]) -> string        a chunk that returns the value, with shared and recursive references
function serpent.dump(value, op)
  return serialize(value, options(op, {name = "_", compact = true, sparse = true}, "dump"))
end

serpent.serialize = function(value, op) return serialize(value, options(op, {}, "serialize")) end

-- An environment without functions: every name returns the environment, and calls raise an error.
local function safe_environment()
  return setmetatable({}, {
    __index = function(t) return t end,
    __call = function() error("cannot call functions", 0) end,
  })
end

-- syntax: serpent.load(text [, {safe = true}]) -> true, value | false, message
-- safe = false: the text may call the global functions.
function serpent.load(text, op)
  text = arg.string(text, 1, "load")
  op = arg.optional(arg.table, op, {}, 2, "load")
  local environment = op.safe == false and _G or safe_environment()
  local chunk, message = load("return " .. text, "=serpent", "t", environment)
  if not chunk then chunk, message = load(text, "=serpent", "t", environment) end
  if not chunk then return false, message end
  return pcall(chunk)
end

return serpent
