-- Attributes of sessions that all workers of a server have (help: workers). A value that can cross is written when it is set.
-- A table that was given out may be changed in place: that is looked for when a page ends, and once a second.
local core, py = ...

local codec, getmetatable, next, pairs, pcall, rawtype, setmetatable =
  core.table_codec, core.getmetatable, next, pairs, pcall, core.rawtype, setmetatable

local GIVEN_TICKS <const> = 10

local states = setmetatable({}, {__mode = "k"}) -- session -> its state
local given = setmetatable({}, {__mode = "k"}) -- session -> for how many ticks its tables are looked at

-- Fields of a state:
--   number       of the session
--   changes      how often other workers had changed something when it was read last
--   attributes   name -> value
--   stored       name as bytes -> value as bytes, as all workers have them
--   tables       name -> encoded bytes of the table when it was written or read

local shared = {}
core.shared_attributes = shared

-- `value` as bytes, nil when other workers can't have it.
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

local function settle(state)
  for name, before in pairs(state.tables) do
    local value = state.attributes[name]
    local bytes = encoded(value)
    if bytes ~= before then put(state, name, value, bytes) end
  end
end

local function give(session)
  if not next(given) then py.given() end
  given[session] = GIVEN_TICKS
end

-- Applies the differences between the rows of a session and the values here.
local function take(state, rows)
  local attributes, stored, tables = state.attributes, state.stored, state.tables
  for key, bytes in pairs(rows) do
    if stored[key] ~= bytes then
      local name, value = codec.load(key), codec.load(bytes)
      attributes[name], stored[key] = value, bytes
      tables[name] = rawtype(value) == "table" and encoded(value) or nil -- not `bytes`: fields have no order
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

--- Takes what other workers have changed.
function shared.refresh(session)
  local state = states[session]
  if given[session] then settle(state) end -- first: what is read then has it
  local changes, rows = py.rows(state.number, state.changes)
  if not changes then return end
  state.changes = changes
  take(state, codec.load(rows))
end

function shared.set(session, name, value)
  local state = states[session]
  state.attributes[name] = value
  put(state, name, value, value ~= nil and encoded(value) or nil)
end

function shared.get(session, name)
  local state = states[session]
  if state.tables[name] then give(session) end
  return state.attributes[name]
end

--- All tables of the session may be changed from now on.
function shared.give(session)
  if next(states[session].tables) then give(session) end
end

--- A page ends that has used the session.
function shared.settle(session)
  if not given[session] then return end
  given[session] = nil
  settle(states[session])
end

function shared.forget(session) given[session] = nil end

py.attach(core.ref(function()
  for session, ticks in pairs(given) do
    settle(states[session])
    given[session] = ticks > 1 and ticks - 1 or nil
  end
  if next(given) then py.given() end
end))
