-- Makes calls of the whole API with arguments in other forms, and with wrong ones; see test_conversions.py.

local core = test.core
local pack, rawtype, unpack = table.pack, core.rawtype, table.unpack

local WRONG <const> = { -- each call gets every third of them, another third than its neighbours; unknown calls get all
  "nil", "true", "print", "{}", "0/0", "-1", "1/0", "math.maxinteger", "'a\\0b'", "'\\xff\\xfe'", "1.5", "2^53", "'x'", "1e308", "''", "math.mininteger",
  "'%'", "('x'):rep(70000)",
}
local SHARE <const> = 3
local INNER <const> = {mqttlocal = true, mqttbroker = true} -- plain tables, with functions for their modules only
local PAGE <const> = {request = true, response = true, cookie = true, filter = true, deferred = true, session = true}
local DEEPEST <const> = 5
local PAGE_MS <const> = 500

local jobs, next_job, makers, cases = {}, 1, {}, {}

audit = {findings = {}, count = 0}

-- ---- the calls

-- The names of modules as the calls have them.
local function modules()
  local all = setmetatable({}, {__index = _G})
  local required = {
    jwt = "jwt", cbor = "org.conman.cbor", sqlutil = "sqlutil", rwfile = "rwfile", serpent = "serpent", xml2table = "xml2table", ltn12 = "ltn12",
    sparkplug = "SparkplugB", httpcm = "httpc", mqttcm = "mqttc", mqtt3cm = "mqtt3c", hubm = "smq.hub", clientm = "smq.client",
    mtlm = "smq.mtl", connm = "smq.conn", clusterm = "smq.cluster", mqttbrokerm = "mqttbroker",
  }
  for name, module in pairs(required) do all[name] = require(module) end
  return all
end

local function function_of(case)
  if case.kind then
    local object = assert(makers[case.kind], case.kind)()
    return object and object[case.method], object
  end
  local value = case.modules
  for part in case.name:gmatch"[^.]+" do value = core.rawtype(value) == "table" and value[part] or nil end
  return value
end

local function is_callable(value)
  return rawtype(value) == "function" or core.getmetatable(value) and core.getmetatable(value).__call
end

local lane

-- Runs f apart from the page and gives what pcall says, nil when it blocks.
local function apart(f)
  lane = lane or ba.thread.create()
  local results
  lane:run(function() results = pack(pcall(f)) end)
  for i = 1, 30 do
    core.sleep(i < 10 and 0 or 1)
    if results then return results end
  end
  lane = nil
end

local function made(case, arguments)
  local f, object = function_of(case)
  if not is_callable(f) then return {case.is_extra, case.name .. " is not a function", n = 2} end
  local all = arguments
  if case.kind then
    all = {n = arguments.n + 1, object}
    table.move(arguments, 1, arguments.n, 2, all)
  end
  local function call() return f(unpack(all, 1, all.n)) end
  audit.count = audit.count + 1
  if PAGE[case.kind] then
    local results = pack(pcall(call))
    if case.kind == "deferred" then pcall(object.close, object) end
    return results
  end
  return apart(call)
end

-- ---- what comes of it

local function shown(value, depth)
  local kind = core.type(value)
  if kind == "string" and value:find"^-----BEGIN" then return "PEM" end -- another one each time
  if kind == "string" then return #value > 60 and ("%q…"):format(value:sub(1, 60)) or ("%q"):format(value) end
  if kind == "number" or kind == "boolean" or kind == "nil" then return tostring(value) end
  if kind ~= "table" or depth == 0 then return kind end
  local parts = {}
  for key, item in pairs(value) do parts[#parts + 1] = tostring(key) .. " = " .. shown(item, depth - 1) end
  table.sort(parts)
  return "{" .. table.concat(parts, ", ") .. "}"
end

local function outline(results)
  if not results then return "blocks" end
  local parts = {}
  for i = 1, results.n do parts[i] = shown(results[i], 3) end
  return table.concat(parts, ", ")
end

local function fault_of(results)
  if not results or results[1] then return nil end
  local message = results[2]
  if message == nil then return nil end -- a page that was ended
  if rawtype(message) ~= "string" then return "the error is not text: " .. tostring(message) end
  if message:find("internal error", 1, true) or message:find("^smqrt/apps/lua/") or message:find("attempt to ", 1, true) then return message end
end

local function note(case, arguments, what)
  local parts = {}
  for i = 1, arguments.n do parts[i] = shown(arguments[i], 3) end
  audit.findings[#audit.findings + 1] = ("%s(%s): %s"):format(case.name, table.concat(parts, ", "), what)
end

-- ---- places of values in arguments, options in tables among them

local function places(arguments)
  local list = {}
  local function walk(value, path)
    for key, item in pairs(value) do
      if key ~= "n" or #path > 0 then
        local here = {unpack(path)}
        here[#here + 1] = key
        if core.type(item) == "table" and #here < DEEPEST then walk(item, here) end
        list[#list + 1] = {path = here, name = table.concat(here, "."), value = item}
      end
    end
  end
  walk(arguments, {})
  return list
end

local function changed(arguments, path, value)
  local target = arguments
  for i = 1, #path - 1 do target = target[path[i]] end
  target[path[#path]] = value
  return arguments
end

local function other_forms(value)
  if math.type(value) == "integer" then
    return {("%d"):format(value), (" %d "):format(value), ("0x%x"):format(value), value + 0.0, ("%d.0"):format(value)}
  end
  if math.type(value) == "float" then return {tostring(value)} end
  local number = rawtype(value) == "string" and math.tointeger(tonumber(value))
  if number and tostring(number) == value then return {number} end
  return {}
end

-- ---- jobs: each makes one call

local function job(case, run)
  jobs[#jobs + 1] = {case = case, run = run}
end

local function compare(case, place, form)
  job(case, function(environment)
    local arguments = changed(case.arguments(environment), place.path, form)
    local results = made(case, arguments)
    local fault, text = fault_of(results), outline(results)
    if fault then return note(case, arguments, fault) end
    if text == case.first or not results or case.first == "blocks" then return end -- how long it takes differs
    if case.first ~= case.second and (results and results[1]) == case.done then return end
    note(case, arguments, text .. " instead of " .. case.first)
  end)
end

local function conversions(case, other_in)
  for _, which in ipairs{"first", "second"} do
    job(case, function(environment)
      local arguments = case.arguments(environment)
      local results = made(case, arguments)
      case[which], case.done = outline(results), results and results[1]
      if fault_of(results) then note(case, arguments, fault_of(results)) end
    end)
  end
  for _, place in ipairs(places(case.arguments(other_in))) do
    if not case.means_another[place.name] then
      for _, form in ipairs(other_forms(place.value)) do compare(case, place, form) end
    end
  end
end

local shift = 0

local function wrong(case, other_in)
  local here = places(case.arguments(other_in))
  if #here == 0 then here = {{path = {1}}, {path = {2}}} end
  for _, place in ipairs(here) do
    shift = shift + 1
    local share = case.is_extra and 1 or SHARE
    for at = shift % share + 1, #WRONG, share do
      local value = assert(load("return " .. WRONG[at]))()
      job(case, function(environment)
        local arguments = changed(case.arguments(environment), place.path, value)
        if #place.path == 1 and place.path[1] > arguments.n then arguments.n = place.path[1] end
        local results = made(case, arguments)
        local fault = fault_of(results)
        if fault then note(case, arguments, fault) end
      end)
    end
  end
end

local function case_of(line, environment, kinds)
  local name, code = line:match"^(%S+) | ?(.*)$"
  local kind, method = name:match"^(%w+):(.*)$"
  local chunk = assert(load("return table.pack(" .. code .. ")", "=" .. name, "t", environment))
  local function arguments(page) -- of this page
    environment.request = page
    return chunk()
  end
  return {name = name, kind = kind, method = method, arguments = arguments, modules = environment, means_another = kinds[name] or {}}
end

-- Lines for the methods of objects that `named` doesn't name; group: what they begin with, "a-h".
local function other_methods(named, group)
  local lines = {}
  named = "\n" .. named
  for kind, make in pairs(makers) do
    if not PAGE[kind] and not INNER[kind] then
      local meta = kind ~= "JSONS" and core.getmetatable(make())
      local methods = meta and meta.__index
      while core.rawtype(methods) == "table" do
        for name, value in pairs(methods) do
          local line = kind .. ":" .. tostring(name)
          local is_new = line:lower():find("^[" .. group .. "]") and not named:find("\n" .. line .. " |", 1, true)
          if rawtype(value) == "function" and name ~= "__index" and is_new then lines[#lines + 1] = line .. " | " end
        end
        methods = core.getmetatable(methods) and core.getmetatable(methods).__index
      end
    end
  end
  return table.concat(lines, "\n")
end

-- Prepares the lines of `calls`. which: "conversions" or "wrong"; named: the lines of all groups.
function audit.prepare(which, group, calls, named, makers_text, means_another, fixtures)
  local environment = setmetatable(fixtures, {__index = modules()})
  for kind, code in makers_text:gmatch"(%w+) = ([^\n]+)" do
    makers[kind] = assert(load("return " .. code, "=" .. kind, "t", environment))
  end
  if which == "wrong" then calls = calls .. "\n" .. other_methods(named, group) end
  for line in calls:gmatch"[^\n]+" do
    local case = case_of(line, environment, means_another)
    case.is_extra = line:find"| $" ~= nil
    if which == "wrong" then wrong(case, audit.request) else conversions(case, audit.request) end
  end
end

-- Makes calls until one ends the page, or it has taken long.
function audit.step(page)
  audit.request = page
  local last_ms = core.clock() + PAGE_MS
  while next_job <= #jobs do
    local one = jobs[next_job]
    next_job = next_job + 1
    audit.current = one.case.name
    one.run(page)
    if not page:valid() or page.closed or core.clock() > last_ms then break end
  end
  audit.done = next_job > #jobs
end
