-- The prompt of `smqrt lua`: runs lines in the environment of an application, and prints values.
local core, py = ...

local concat, find, format, gsub, load, next, pack, pairs = table.concat, string.find, string.format, string.gsub, load, next, table.pack, pairs
local pcall, rawtype, select, setmetatable, sort = pcall, core.rawtype, select, setmetatable, table.sort
local sub, tostring, type, xpcall = string.sub, tostring, type, xpcall

local MAX_OUTPUT_BYTES <const> = 65536
local MAX_TEXT_BYTES <const> = 1000 -- of a string within a value
local MAX_DEPTH <const> = 3         -- of tables
local MAX_ITEMS <const> = 50        -- of each table

local sessions = {} -- number -> {env =, out =, bytes =}

local function put(session, text)
  if session.bytes >= MAX_OUTPUT_BYTES then return end
  session.bytes = session.bytes + #text
  if session.bytes >= MAX_OUTPUT_BYTES then
    text = sub(text, 1, #text - (session.bytes - MAX_OUTPUT_BYTES)) .. format("\n... (output ends after %d bytes)\n", MAX_OUTPUT_BYTES)
  end
  session.out[#session.out + 1] = text
end

local function quoted(text)
  local rest = #text - MAX_TEXT_BYTES
  local shown = gsub(format("%q", sub(text, 1, MAX_TEXT_BYTES)), "\\\n", "\\n")
  return rest > 0 and format("%s... (%d bytes)", shown, #text) or shown
end

local function text_of(value)
  local done, text = pcall(tostring, value) -- a metamethod may fail
  return done and text or format("(%s)", type(value))
end

-- The first keys of a table: the array, then numbers and other keys in order; and whether there are more.
local function keys_of(value)
  local keys, key = {}, nil
  for at = 1, MAX_ITEMS + 1 do
    key = next(value, key)
    if key == nil then break end
    keys[at] = key
  end
  local is_cut = #keys > MAX_ITEMS
  keys[MAX_ITEMS + 1] = nil
  sort(keys, function(a, b)
    local kind_a, kind_b = rawtype(a), rawtype(b)
    if kind_a ~= kind_b then return kind_a == "number" or kind_b ~= "number" and kind_a < kind_b end
    if kind_a == "number" or kind_a == "string" then return a < b end
    return false
  end)
  return keys, is_cut
end

local show

local function show_table(session, value, depth, around)
  if around[value] then return put(session, "(this table again)") end
  if depth > MAX_DEPTH then return put(session, next(value) == nil and "{}" or "{...}") end
  around[value] = true
  local keys, is_cut = keys_of(value)
  local indent, expected = ("  "):rep(depth), 1
  put(session, "{")
  for at = 1, #keys do
    if session.bytes >= MAX_OUTPUT_BYTES then break end
    local key = keys[at]
    put(session, (at > 1 and "," or "") .. "\n" .. indent)
    if key == expected then
      expected = expected + 1
    elseif rawtype(key) == "string" and find(key, "^[%a_][%w_]*$") then
      put(session, key .. " = ")
    else
      put(session, "[" .. (rawtype(key) == "string" and quoted(key) or text_of(key)) .. "] = ")
    end
    show(session, rawget(value, key), depth + 1, around)
  end
  if is_cut then put(session, ",\n" .. indent .. "...") end
  put(session, #keys > 0 and "\n" .. ("  "):rep(depth - 1) .. "}" or "}")
  around[value] = nil
end

-- Appends a value: tables to a bounded depth and width, without metamethods; objects of the server by their names.
function show(session, value, depth, around)
  if rawtype(value) == "string" then return put(session, quoted(value)) end
  if rawtype(value) == "table" and type(value) == "table" then return show_table(session, value, depth, around) end
  put(session, text_of(value))
end

-- The function of a chunk, nil for an incomplete one; or false and a message.
local function compiled(source, env)
  local chunk = load("return " .. source, "=prompt", "t", env)
  if chunk then return chunk end
  local message
  chunk, message = load(source, "=prompt", "t", env)
  if chunk then return chunk end
  if find(message, "<eof>$") then return nil end
  return false, message
end

local entries = {}

--- Begins a session with the variables of an application. -> whether the application has some
function entries.open(number, application)
  local app = core.apps.table_of(application)
  if not app then return false end
  local session = {out = {}, bytes = 0}
  sessions[number] = session
  local function print(...)
    for at = 1, select("#", ...) do put(session, (at > 1 and "\t" or "") .. text_of((select(at, ...)))) end
    put(session, "\n")
  end
  session.env = setmetatable({print = print}, {__index = app, __newindex = app})
  return true
end

function entries.close(number) sessions[number] = nil end

--- Runs source text. -> "done" | "more": the source is incomplete | "error"
function entries.run(number, source)
  local session = sessions[number]
  session.out, session.bytes = {}, 0
  local chunk, message = compiled(source, session.env)
  if chunk == nil then return "more" end
  if not chunk then
    put(session, message)
    return "error"
  end
  local values = pack(xpcall(chunk, core.traceback))
  if not values[1] then
    put(session, text_of(values[2]))
    return "error"
  end
  for at = 2, values.n do
    show(session, values[at], 1, {})
    put(session, "\n")
  end
  return "done"
end

--- Returns the output since the last call, also of an activity that was ended.
function entries.take(number)
  local session = sessions[number]
  local text = concat(session.out)
  session.out = {}
  return text
end

for name, entry in pairs(entries) do py.entry(name, core.ref(entry)) end
