-- Argument checks of the API, and its errors, which name the file and line of the application instead of the library.

local core = ...

local error, format, getinfo, mathtype, min, tointeger = error, string.format, debug.getinfo, math.type, math.min, math.tointeger
local find, pairs, rawtype, select, sub, tonumber, tostring = string.find, pairs, type, select, string.sub, tonumber, tostring

local LIBRARY <const> = "@smqrt/apps/lua/lib/"

core.failure = {} -- the first result of a Python function that failed; the second is the message
local failure = core.failure

local function is_library(info)
  return info.what == "C" or sub(info.source, 1, #LIBRARY) == LIBRARY
end
core.is_library = is_library

--- The position of the innermost application frame, as "file:line: ", and the info of that frame.
local function where()
  for level = 2, 100 do
    local info = getinfo(level, "Sln")
    if not info then break end
    if not is_library(info) then return format("%s:%d: ", info.short_src, info.currentline), info end
  end
  return ""
end
core.where = where

-- The number of letters to insert, delete or replace to get from one name to another.
local function distance(from, to)
  local row = {}
  for at = 0, #to do row[at] = at end
  for line = 1, #from do
    local diagonal = row[0]
    row[0] = line
    for at = 1, #to do
      local replaced = diagonal + (sub(from, line, line) == sub(to, at, at) and 0 or 1)
      diagonal = row[at]
      row[at] = min(replaced, row[at] + 1, row[at - 1] + 1)
    end
  end
  return row[#to]
end

--- The known name that was probably meant, nil when none is similar. The keys of `known` are the known names.
local function nearest_name(name, known)
  local given, nearest = sub(tostring(name), 1, 32), nil
  local fewest = #given // 3 + 1 -- more changed letters are another word
  for one in pairs(known) do
    local changed = distance(given, one)
    if changed < fewest or (changed == fewest and nearest and one < nearest) then fewest, nearest = changed, one end
  end
  return nearest
end
core.nearest_name = nearest_name

--- The log line for an option of `what`, such as "smq.hub", that is not known.
function core.unknown_option(what, name, known)
  local near = nearest_name(name, known)
  local meant = near and format("; did you mean '%s'?", near) or ""
  return format("%s%s has no option '%s'; it is ignored%s", where(), what, tostring(name), meant)
end

--- Raise `message` with the line of the application that called the library.
local function raise(message)
  error(where() .. tostring(message), 0)
end
core.raise = raise

local function check(value, ...)
  if value == failure then raise((...)) end
  return value, ...
end
core.check = check

--- Raise the error of an argument of the wrong type. index: its number or name.
local function bad_argument(index, fname, expected, value)
  local got = value == nil and "no value" or core.type(value)
  raise(format("bad argument #%s to '%s' (%s expected, got %s)", index, fname, expected, got))
end

--- Raise the error of an argument that breaks a rule.
local function broken_rule(index, fname, rule)
  raise(format("bad argument #%s to '%s' (%s)", index, fname, rule))
end

local arg = {}
core.arg = arg

-- Each check returns the argument, or raises an error when it has the wrong type. As in Lua's own functions, numbers are converted
-- to text and text to numbers. Callers must therefore use the returned value.

function arg.string(value, index, fname)
  local kind = rawtype(value)
  if kind == "string" then return value end
  if kind == "number" then return tostring(value) end
  bad_argument(index, fname, "string", value)
end

function arg.number(value, index, fname)
  local kind = rawtype(value)
  if kind == "number" then return value end
  return kind == "string" and tonumber(value) or bad_argument(index, fname, "number", value)
end

function arg.integer(value, index, fname)
  if mathtype(value) == "integer" then return value end
  return tointeger(arg.number(value, index, fname)) or broken_rule(index, fname, "number has no integer representation")
end

local MAX_MS <const> = 1e12 -- about 32 years; timers do not accept infinity

--- A duration, limited to 0 and `MAX_MS`.
function arg.milliseconds(value, index, fname)
  local ms = arg.number(value, index, fname)
  if ms ~= ms then broken_rule(index, fname, "milliseconds expected, got nan") end
  return ms < 0 and 0 or ms > MAX_MS and MAX_MS or ms
end

--- An integer above 0.
function arg.positive(value, index, fname)
  local number = arg.integer(value, index, fname)
  if number < 1 then broken_rule(index, fname, format("a number above 0 expected, got %d", number)) end
  return number
end

--- An integer, 0 or more.
function arg.size(value, index, fname)
  local number = arg.integer(value, index, fname)
  if number < 0 then broken_rule(index, fname, format("a size expected, got %d", number)) end
  return number
end

local FIRST_S <const>, LAST_S <const> = -62135596800, 253402300799 -- the years 1 to 9999

--- A Unix time within the range of calendar dates.
function arg.time(value, index, fname)
  local seconds = arg.number(value, index, fname)
  if not (seconds >= FIRST_S and seconds <= LAST_S) then
    broken_rule(index, fname, "seconds since 1970 of a year from 1 to 9999 expected, got " .. tostring(value))
  end
  return seconds
end

--- A text for a system call, which must not contain NUL.
function arg.plain(value, index, fname)
  local text = arg.string(value, index, fname)
  if find(text, "\0", 1, true) then broken_rule(index, fname, "a string without the character NUL expected") end
  return text
end

function arg.table(value, index, fname)
  if core.type(value) ~= "table" then bad_argument(index, fname, "table", value) end
  return value
end

arg["function"] = function(value, index, fname)
  if rawtype(value) ~= "function" then bad_argument(index, fname, "function", value) end
  return value
end

function arg.boolean(value, index, fname)
  if rawtype(value) ~= "boolean" then bad_argument(index, fname, "boolean", value) end
  return value
end

--- An instance of a class of `core.class`.
function arg.instance(value, class, index, fname)
  if rawtype(value) ~= "table" or core.getmetatable(value) ~= class then bad_argument(index, fname, class.__name, value) end
  return value
end

--- Check an optional argument; return `default` when it is nil.
function arg.optional(check_type, value, default, index, fname)
  if value == nil then return default end
  return check_type(value, index, fname)
end

core.bad_argument, core.broken_rule = bad_argument, broken_rule
