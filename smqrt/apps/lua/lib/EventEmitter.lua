-- require "EventEmitter": listeners of named events, as in Node.js (spec: bas-api §12).
--
-- Each object stores its listeners in its own field `_events`, so any table can inherit from an emitter:
-- setmetatable(t, {__index = EventEmitter}).
local core = ...

local arg, insert, ipairs, move, rawget, rawtype = core.arg, table.insert, ipairs, table.move, rawget, core.rawtype
local remove, setmetatable, tostring = table.remove, setmetatable, tostring

local MAX_LISTENERS <const> = 10 -- of one event; more of them are probably a leak, which is logged once

local EventEmitter = {defaultMaxListeners = MAX_LISTENERS}
local class = {__index = EventEmitter, __name = "EventEmitter"}

local function state_of(self, fname)
  if rawtype(self) ~= "table" then core.bad_argument(1, fname, "EventEmitter", self) end
  local state = rawget(self, "_events")
  if not state then
    state = {lists = {}, names = {}, warned = {}}
    self._events = state
  end
  return state
end

local function check(self, event, listener, fname)
  local state = state_of(self, fname)
  if event == nil or event ~= event then core.bad_argument(1, fname, "name of an event", event) end
  arg["function"](listener, 2, fname)
  return state
end

local function warn_of_many(self, state, event, count)
  local max_listeners = self:getMaxListeners()
  if max_listeners > 0 and count > max_listeners and not state.warned[event] then
    state.warned[event] = true
    tracep(false, 4, "EventEmitter: " .. count .. " listeners of '" .. tostring(event) .. "'; setMaxListeners allows more")
  end
end

-- Lists are replaced, never changed: a running emit continues with the old list.
local function add(self, event, listener, is_first, is_once, fname)
  local state = check(self, event, listener, fname)
  if state.lists.newListener then self:emit("newListener", event, listener) end
  local old = state.lists[event]
  if not old then state.names[#state.names + 1] = event end
  local list = old and move(old, 1, #old, 1, {}) or {}
  insert(list, is_first and 1 or #list + 1, {call = listener, is_once = is_once})
  state.lists[event] = list
  warn_of_many(self, state, event, #list)
  return self
end

local function remove_event(state, event)
  state.lists[event], state.warned[event] = nil, nil
  for at, name in ipairs(state.names) do
    if name == event then
      remove(state.names, at)
      break
    end
  end
end

-- Remove the last listener for which `matches` returns true; return it.
local function remove_listener(self, event, matches, fname)
  local state = state_of(self, fname)
  local list = state.lists[event]
  for at = list and #list or 0, 1, -1 do
    if matches(list[at]) then
      local entry = list[at]
      if #list == 1 then
        remove_event(state, event)
      else
        list = move(list, 1, #list, 1, {})
        remove(list, at)
        state.lists[event] = list
      end
      if state.lists.removeListener then self:emit("removeListener", event, entry.call) end
      return entry
    end
  end
end

-- syntax: EventEmitter.create() -> emitter        also EventEmitter(), EventEmitter.new(), EventEmitter:new()
function EventEmitter.create()
  return setmetatable({}, class)
end
EventEmitter.new = EventEmitter.create

-- syntax: emitter:on(event, listener) -> emitter       prepend...: called before the existing listeners
-- syntax: emitter:once(event, listener) -> emitter     for the next event only
function EventEmitter:on(event, listener) return add(self, event, listener, false, false, "on") end
function EventEmitter:once(event, listener) return add(self, event, listener, false, true, "once") end
function EventEmitter:prependListener(event, listener) return add(self, event, listener, true, false, "prependListener") end
function EventEmitter:prependOnceListener(event, listener) return add(self, event, listener, true, true, "prependOnceListener") end
EventEmitter.addListener = EventEmitter.on

-- syntax: emitter:off(event, listener) -> emitter       removes the last one when the listener was added several times
function EventEmitter:off(event, listener)
  check(self, event, listener, "off")
  remove_listener(self, event, function(entry) return entry.call == listener end, "off")
  return self
end
EventEmitter.removeListener = EventEmitter.off

-- syntax: emitter:removeAllListeners([event]) -> emitter
function EventEmitter:removeAllListeners(event)
  local state = state_of(self, "removeAllListeners")
  for _, name in ipairs(event ~= nil and {event} or move(state.names, 1, #state.names, 1, {})) do
    while remove_listener(self, name, function() return true end, "removeAllListeners") do end
  end
  return self
end

-- syntax: emitter:emit(event, ...) -> whether there was a listener
-- Calls the listeners in order with the other arguments. Errors of listeners are raised here; the event "error" without a listener raises one.
function EventEmitter:emit(event, ...)
  local state = state_of(self, "emit")
  if event == nil or event ~= event then core.bad_argument(1, "emit", "name of an event", event) end
  local list = state.lists[event]
  if not list then
    if event == "error" then core.raise(... == nil and "unhandled 'error' event" or core.describe((...))) end
    return false
  end
  for _, entry in ipairs(list) do
    if not entry.is_once or remove_listener(self, event, function(other) return other == entry end, "emit") then entry.call(...) end
  end
  return true
end

-- syntax: emitter:listeners(event) -> array of functions
function EventEmitter:listeners(event)
  local list = {}
  for at, entry in ipairs(state_of(self, "listeners").lists[event] or {}) do list[at] = entry.call end
  return list
end

-- syntax: emitter:listenerCount(event) -> number
function EventEmitter:listenerCount(event)
  return #(state_of(self, "listenerCount").lists[event] or {})
end

-- syntax: emitter:eventNames() -> array of the events that have listeners
function EventEmitter:eventNames()
  local names = state_of(self, "eventNames").names
  return move(names, 1, #names, 1, {})
end

-- syntax: emitter:setMaxListeners(n) -> emitter       0: no limit; a warning is logged once for an event with more listeners
function EventEmitter:setMaxListeners(count)
  state_of(self, "setMaxListeners").max_listeners = arg.size(count, 1, "setMaxListeners")
  return self
end

function EventEmitter:getMaxListeners()
  return state_of(self, "getMaxListeners").max_listeners or EventEmitter.defaultMaxListeners
end

return setmetatable(EventEmitter, {__call = EventEmitter.create})
