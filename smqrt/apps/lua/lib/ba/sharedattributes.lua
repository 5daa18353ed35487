-- Session attributes that all workers of a server share (help: workers).
--
-- A value is written when it is set. An application that has read a table may change it in place: these tables are compared with
-- their last encoding once a second, and when the page ends.
local core, py = ...

local codec, getmetatable, next, pairs, pcall, rawtype, setmetatable =
  core.table_codec, core.getmetatable, next, pairs, pcall, core.rawtype, setmetatable

local WATCH_TICKS <const> = 10

local states = setmetatable({}, {__mode = "k"}) -- session -> its state
local watched = setmetatable({}, {__mode = "k"}) -- session -> for how many more ticks (of one second) its tables are compared

-- Fields of a state:
--   number       of the session
--   changes      number of changes by other workers at the last read
--   attributes   name -> value
--   stored       encoded name -> encoded value, as in all workers
--   tables       name -> encoded table when it was last written or read

local shared = {}
core.shared_attributes = shared

-- Returns an encoded value, nil when it can't be shared: a function, or a table with a metatable.
local function encoded(value)
  if rawtype(value) == "table" and getmetatable(value) then return nil end
  local done, bytes = pcall(codec.dump, value)
  return done and bytes or nil
end

local function put(state, name, value, bytes)
  local key = encoded(name)
  if not key then return end
  if bytes == (state.tables[name] or state.stored[key]) then return end
  if not py.put(state.number, key, bytes) then bytes = nil end
  state.stored[key] = bytes
  state.tables[name] = rawtype(value) == "table" and bytes or nil
end

-- Writes the tables that were changed in place.
local function write_changes(state)
  for name, before in pairs(state.tables) do
    local value = state.attributes[name]
    local bytes = encoded(value)
    if bytes ~= before then put(state, name, value, bytes) end
  end
end

local function watch(session)
  if not next(watched) then py.given() end
  watched[session] = WATCH_TICKS
end

-- Applies the differences between the rows of a session and its values in this worker.
local function apply_rows(state, rows)
  local attributes, stored, tables = state.attributes, state.stored, state.tables
  for key, bytes in pairs(rows) do
    if stored[key] ~= bytes then
      local name, value = codec.load(key), codec.load(bytes)
      attributes[name], stored[key] = value, bytes
      tables[name] = rawtype(value) == "table" and encoded(value) or nil -- encoded again: the order of fields may differ from `bytes`
    end
  end
  for key in pairs(stored) do
    if rows[key] == nil then
      local name = codec.load(key)
      attributes[name], stored[key], tables[name] = nil, nil, nil
    end
  end
end

--- Begins to share the attributes of a session.
function shared.begin(session, number, attributes)
  states[session] = {number = number, changes = -1, attributes = attributes, stored = {}, tables = {}}
end

--- Reads the changes of other workers.
function shared.refresh(session)
  local state = states[session]
  if watched[session] then write_changes(state) end -- first: the rows must include these changes
  local changes, rows = py.rows(state.number, state.changes)
  if not changes then return end
  state.changes = changes
  apply_rows(state, codec.load(rows))
end

function shared.set(session, name, value)
  local state = states[session]
  state.attributes[name] = value
  put(state, name, value, value ~= nil and encoded(value) or nil)
end

function shared.get(session, name)
  local state = states[session]
  if state.tables[name] then watch(session) end
  return state.attributes[name]
end

--- Watches all tables of a session, which an application has read.
function shared.watch(session)
  if next(states[session].tables) then watch(session) end
end

--- Writes the changes of a page that has ended.
function shared.end_page(session)
  if not watched[session] then return end
  watched[session] = nil
  write_changes(states[session])
end

function shared.forget(session) watched[session] = nil end

py.attach(core.ref(function()
  for session, ticks in pairs(watched) do
    write_changes(states[session])
    watched[session] = ticks > 1 and ticks - 1 or nil
  end
  if next(watched) then py.given() end
end))
