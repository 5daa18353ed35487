-- ba.datetime: a point in time with nanoseconds, and the UTC offset in minutes with which it is shown (spec: bas-api §7).
local core, py = ...

local arg, raise, rawtype = core.arg, core.raise, core.rawtype
local format, gsub, match, next, rep, select, upper = string.format, string.gsub, string.match, next, string.rep, select, string.upper
local getmetatable, maxinteger, setmetatable, tointeger, tonumber =
  core.getmetatable, math.maxinteger, setmetatable, math.tointeger, tonumber

local DAY_S <const>, BILLION <const> = 86400, 1000000000
local MIN_S <const>, MAX_S <const> = -62135596800, 253402300799 -- the years 1 to 9999
local MAX_OFFSET <const> = 24 * 60
local MAX_TEXT_BYTES <const> = 64 -- the longest valid text has 36
local RANGE <const> = "Invalid datetime range"
local NANOSECONDS <const> = {days = DAY_S * BILLION, hours = 3600 * BILLION, mins = 60 * BILLION, secs = BILLION, nsecs = 1}

local ERA_DAYS <const> = 146097         -- of 400 years, after which the calendar repeats
local DAYS_BEFORE_1970 <const> = 719468 -- since 0000-03-01

local methods = {}
local Datetime = core.class("datetime", methods)

--- Returns the days from 1970-01-01 to a date of the Gregorian calendar.
-- In this calculation years begin in March, so that a leap day is the last day of its year.
local function days_of(year, month, day)
  if month <= 2 then year = year - 1 end
  local era = year // 400
  local year_of_era = year - era * 400
  local day_of_year = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
  return era * ERA_DAYS + year_of_era * 365 + year_of_era // 4 - year_of_era // 100 + day_of_year - DAYS_BEFORE_1970
end

--- Returns year, month and day of a number of days: the inverse.
local function date_of(days)
  days = days + DAYS_BEFORE_1970
  local era = days // ERA_DAYS
  local day_of_era = days - era * ERA_DAYS
  local year = (day_of_era - day_of_era // 1460 + day_of_era // 36524 - day_of_era // 146096) // 365
  local day_of_year = day_of_era - (365 * year + year // 4 - year // 100)
  local month_from_march = (5 * day_of_year + 2) // 153
  local month = month_from_march < 10 and month_from_march + 3 or month_from_march - 9
  return year + era * 400 + (month <= 2 and 1 or 0), month, day_of_year - (153 * month_from_march + 2) // 5 + 1
end

local function is_datetime(value)
  return rawtype(value) == "table" and getmetatable(value) == Datetime
end

--- Returns a datetime, or nil and an error outside the years 1 to 9999.
local function new(seconds, nanoseconds, offset)
  seconds, nanoseconds = seconds + nanoseconds // BILLION, nanoseconds % BILLION
  if seconds < MIN_S or seconds > MAX_S or offset < -MAX_OFFSET or offset > MAX_OFFSET then return nil, RANGE end
  return setmetatable({seconds = seconds, nanoseconds = nanoseconds, minutes = offset}, Datetime)
end

--- Returns seconds and nanoseconds of a duration: a table of days, hours, mins, secs, nsecs, or a number of nanoseconds.
local function duration(value, index, fname)
  if rawtype(value) ~= "table" then
    local count = arg.integer(value, index, fname)
    return count // BILLION, count % BILLION
  end
  local seconds, nanoseconds = 0, 0
  for name, factor in next, NANOSECONDS do
    local count = value[name] ~= nil and arg.integer(value[name], index, fname) or 0
    if factor == 1 then nanoseconds = count else seconds = seconds + count * (factor // BILLION) end
  end
  return seconds + nanoseconds // BILLION, nanoseconds % BILLION
end

local function from_fields(year, month, day, hour, min, sec, nanoseconds, offset)
  local days = days_of(year, month, day)
  local back_year, back_month, back_day = date_of(days)
  local exists = back_year == year and back_month == month and back_day == day
  if not exists or hour > 23 or min > 59 or sec > 59 or hour < 0 or min < 0 or sec < 0 then return nil, RANGE end
  return new(days * DAY_S + hour * 3600 + min * 60 + sec - offset * 60, nanoseconds, offset)
end

local function offset_of(zone)
  if zone == "" or zone == "Z" or zone == "z" then return 0 end
  local sign, hours, minutes = match(zone, "^([+-])(%d%d):?(%d%d)$")
  if not sign then return nil end
  return (tonumber(hours) * 60 + tonumber(minutes)) * (sign == "-" and -1 or 1)
end

local function from_text(text)
  if #text > MAX_TEXT_BYTES then return nil, RANGE end -- bounds the backtracking of the patterns below
  local year, month, day, rest = match(text, "^(%d%d%d%d)-(%d%d)-(%d%d)(.*)$")
  if not year then return nil, RANGE end
  local hour, min, sec, fraction, zone = "0", "0", "0", "", ""
  if rest ~= "" then
    hour, min, sec, fraction, zone = match(rest, "^[Tt ](%d%d):(%d%d):?(%d*)%.?(%d*) ?([Zz+-]?[%d:]*)$")
  end
  local offset = zone and offset_of(zone)
  if not offset or #fraction > 9 then return nil, RANGE end
  local nanoseconds = tointeger(fraction .. rep("0", 9 - #fraction))
  return from_fields(tointeger(year), tointeger(month), tointeger(day), tointeger(hour), tointeger(min),
    tointeger(sec) or 0, nanoseconds, offset)
end

local function field(fields, name, default)
  return arg.optional(arg.integer, fields[name], default, 1, "datetime")
end

local function from_table(fields)
  return from_fields(field(fields, "year", 1970), field(fields, "month", 1), field(fields, "day", 1),
    field(fields, "hour", 0), field(fields, "min", 0), field(fields, "sec", 0), field(fields, "nsec", 0),
    field(fields, "offset", 0))
end

local function from_word(word, offset)
  if word == "NOW" then
    local seconds, nanoseconds = py.now()
    return new(seconds, nanoseconds, offset or 0)
  end
  if word == "MIN" then return new(MIN_S, 0, 0) end
  if word == "MAX" then return new(MAX_S, BILLION - 1, 0) end
end

--- Returns the number of arguments after the first that belong to its form.
local function own_arguments(first, ...)
  local max_count = tonumber(first) and 2 or first == "NOW" and 1 or 0
  local count = 0
  for i = 1, max_count do
    if not tonumber((select(i, ...))) then break end
    count = i
  end
  return count
end

local function create(first, second, third)
  if tonumber(first) then
    local seconds = arg.number(first, 1, "datetime")
    local whole = seconds // 1
    local part = tonumber(second) and arg.integer(second, 2, "datetime") or (seconds - whole) * BILLION // 1
    if not tointeger(whole) or not tointeger(part) then return nil, RANGE end -- too large, infinite or NaN
    return new(tointeger(whole), tointeger(part), tonumber(third) and arg.integer(third, 3, "datetime") or 0)
  end
  if rawtype(first) == "table" then
    if is_datetime(first) then return new(first.seconds, first.nanoseconds, first.minutes) end
    return from_table(first)
  end
  local text = arg.string(first, 1, "datetime")
  local word = from_word(upper(text), tonumber(second) and arg.integer(second, 2, "datetime") or nil)
  if word then return word end
  return from_text(text)
end

local function plus(datetime, seconds, nanoseconds)
  return new(datetime.seconds + seconds, datetime.nanoseconds + nanoseconds, datetime.minutes)
end

--- ba.datetime("NOW" [,offset]), ("MIN"), ("MAX"), (ISO 8601 text), (seconds [,nanoseconds [,offset]]), (table): returns a datetime.
-- A further argument, a duration table or nanoseconds, is added. Returns nil, "Invalid datetime range" for invalid values.
function ba.datetime(first, ...)
  if first == nil then first = "NOW" end
  local count = own_arguments(first, ...)
  local datetime, message = create(first, ...)
  local add = select(count + 1, ...)
  if not datetime or add == nil then return datetime, message end
  return plus(datetime, duration(add, count + 2, "datetime"))
end

--- datetime:ticks(): returns seconds since 1970, nanoseconds, offset in minutes.
function methods:ticks()
  return self.seconds, self.nanoseconds, self.minutes
end

--- datetime:offset([minutes]): sets the offset when one is given, and returns it.
function methods:offset(minutes)
  if minutes ~= nil then
    minutes = arg.integer(minutes, 2, "offset")
    if minutes < -MAX_OFFSET or minutes > MAX_OFFSET then raise("bad argument #2 to 'offset' (at most 24 hours)") end
    self.minutes = minutes
  end
  return self.minutes
end

--- datetime:date([localtime]): returns a table of year, month, day, hour, min, sec, nsec, wday, yday, offset; in UTC without localtime.
function methods:date(localtime)
  local offset = arg.optional(arg.boolean, localtime, false, 2, "date") and self.minutes or 0
  local seconds = self.seconds + offset * 60
  local days, rest = seconds // DAY_S, seconds % DAY_S
  local year, month, day = date_of(days)
  return {
    year = year, month = month, day = day, hour = rest // 3600, min = rest // 60 % 60, sec = rest % 60,
    nsec = self.nanoseconds, wday = (days + 4) % 7 + 1, yday = days - days_of(year, 1, 1) + 1, offset = offset,
  }
end

local function zone_text(offset)
  if offset == 0 then return "Z" end
  local minutes = offset < 0 and -offset or offset
  return format("%s%02d:%02d", offset < 0 and "-" or "+", minutes // 60, minutes % 60)
end

--- datetime:tostring([offset]): returns ISO 8601 text with the given offset, by default its own.
function methods:tostring(offset)
  offset = arg.optional(arg.integer, offset, self.minutes, 2, "tostring")
  local seconds = self.seconds + offset * 60
  local year, month, day = date_of(seconds // DAY_S)
  local rest = seconds % DAY_S
  local fraction = self.nanoseconds == 0 and "" or gsub(format(".%09d", self.nanoseconds), "0+$", "")
  return format("%04d-%02d-%02dT%02d:%02d:%02d%s%s", year, month, day, rest // 3600, rest // 60 % 60, rest % 60, fraction,
    zone_text(offset))
end

Datetime.__tostring = methods.tostring

local function in_range(datetime, message)
  return datetime or raise(message)
end

function Datetime.__add(left, right)
  if not is_datetime(left) then left, right = right, left end
  return in_range(plus(left, duration(right, 2, "datetime +")))
end

function Datetime.__sub(left, right)
  if not is_datetime(left) then raise("a datetime can't be subtracted from a duration") end
  if not is_datetime(right) then
    local seconds, nanoseconds = duration(right, 2, "datetime -")
    return in_range(plus(left, -seconds, -nanoseconds))
  end
  local seconds, nanoseconds = left.seconds - right.seconds, left.nanoseconds - right.nanoseconds
  local difference = seconds * BILLION + nanoseconds
  if difference < 0 or seconds > maxinteger // BILLION then raise("datetime difference is negative or too large") end
  return difference
end

function Datetime.__eq(left, right)
  return left.seconds == right.seconds and left.nanoseconds == right.nanoseconds
end

function Datetime.__lt(left, right)
  if left.seconds ~= right.seconds then return left.seconds < right.seconds end
  return left.nanoseconds < right.nanoseconds
end

function Datetime.__le(left, right)
  return not (right < left)
end
