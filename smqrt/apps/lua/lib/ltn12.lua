-- require "ltn12": sources, sinks, filters and pumps of Lua Technical Note 012 (spec: bas-api §12).
--
-- A source returns chunks, then nil. A sink accepts them, then nil. A filter transforms chunks: it returns "" when it needs more input,
-- and nil at its end.
local core = ...

local arg, concat, remove, select, sub = core.arg, table.concat, table.remove, select, string.sub

local BLOCKSIZE <const> = 2048

local filter, source, sink, pump = {}, {}, {}, {}

-- Check that `value` is a function or a callable object, such as those of socket.source and socket.sink.
local function callable(value, index, fname)
  local meta = core.getmetatable(value)
  if core.rawtype(value) == "table" and meta and meta.__call then return value end
  return arg["function"](value, index, fname)
end

-- ---- filters

-- syntax: filter.cycle(low [, context [, extra]]) -> filter       low(context, chunk, extra) -> chunk, context
function filter.cycle(low, context, extra)
  callable(low, 1, "cycle")
  return function(chunk)
    local output
    output, context = low(context, chunk, extra)
    return output
  end
end

-- Pass all output of the filter `f` for `chunk` to `use`; return nil and an error when `use` fails.
local function drain(f, chunk, use)
  local next_input = chunk and ""
  local output = f(chunk)
  while output and output ~= "" do
    local ok, message = use(output)
    if not ok then return nil, message end
    output = f(next_input)
  end
  return true
end

local function collected(f, chunk)
  local parts = {}
  drain(f, chunk, function(part) parts[#parts + 1] = part return true end)
  return concat(parts)
end

local function chain_two(first, second)
  local is_over
  return function(chunk)
    if is_over then return nil end
    local output = collected(first, chunk)
    local result = output ~= "" and collected(second, output) or ""
    if chunk ~= nil then return result end
    is_over = true
    result = result .. collected(second, nil)
    return result ~= "" and result or nil
  end
end

-- syntax: filter.chain(filter1, filter2, ...) -> filter
function filter.chain(first, ...)
  callable(first, 1, "chain")
  for at = 1, select("#", ...) do first = chain_two(first, callable(select(at, ...), at + 1, "chain")) end
  return first
end

-- ---- sources

function source.empty() return function() return nil end end

function source.error(message) return function() return nil, message end end

-- syntax: source.string(text) -> source
function source.string(text)
  if not text then return source.empty() end
  local at = 1
  return function()
    local chunk = sub(text, at, at + BLOCKSIZE - 1)
    at = at + BLOCKSIZE
    return chunk ~= "" and chunk or nil
  end
end

-- syntax: source.table(array of strings) -> source
function source.table(list)
  arg.table(list, 1, "table")
  local at = 0
  return function()
    at = at + 1
    return list[at]
  end
end

-- syntax: source.file(file [, message]) -> source       the file is closed at its end; without a file the source returns the message
function source.file(file, message)
  if not file then return source.error(message or "unable to open file") end
  return function()
    local chunk, fault = file:read(BLOCKSIZE)
    if chunk then return chunk end
    file:close()
    return nil, fault
  end
end

-- syntax: source.simplify(source) -> source       for a source that returns its successor as the second value
function source.simplify(from)
  callable(from, 1, "simplify")
  return function()
    local chunk, other = from()
    if not chunk then return nil, other end
    from = other or from
    return chunk
  end
end

local function filtered(from, f)
  local ready, is_over = {}, false
  return function()
    while not ready[1] do
      if is_over then return nil end
      local chunk, message = from()
      if message then return nil, message end
      is_over = chunk == nil
      drain(f, chunk, function(part) ready[#ready + 1] = part return true end)
    end
    return remove(ready, 1)
  end
end

-- syntax: source.chain(source, filter, ...) -> source
function source.chain(from, ...)
  callable(from, 1, "chain")
  for at = 1, select("#", ...) do from = filtered(from, callable(select(at, ...), at + 1, "chain")) end
  return from
end

-- syntax: source.cat(source, ...) -> source       the concatenation of the sources
function source.cat(...)
  local list, at = {...}, 1
  return function()
    while list[at] do
      local chunk, message = list[at]()
      if chunk or message then return chunk, message end
      at = at + 1
    end
    return nil
  end
end

-- ---- sinks

function sink.null() return function() return 1 end end

function sink.error(message) return function() return nil, message end end

-- syntax: sink.table([t]) -> sink, t       chunks are appended
function sink.table(list)
  list = arg.optional(arg.table, list, {}, 1, "table")
  return function(chunk)
    if chunk then list[#list + 1] = chunk end
    return 1
  end, list
end

-- syntax: sink.file(file [, message]) -> sink       the file is closed at the end
function sink.file(file, message)
  if not file then return sink.error(message or "unable to open file") end
  return function(chunk)
    if chunk then return file:write(chunk) end
    file:close()
    return 1
  end
end

-- syntax: sink.simplify(sink) -> sink       for a sink that returns its successor as the second value
function sink.simplify(to)
  callable(to, 1, "simplify")
  return function(chunk, message)
    local ok, other = to(chunk, message)
    if not ok then return nil, other end
    to = other or to
    return 1
  end
end

-- syntax: sink.chain(filter, ..., sink) -> sink
function sink.chain(...)
  local list = {...}
  local to, f = remove(list), remove(list)
  callable(to, #list + 2, "chain")
  if not f then return to end
  callable(f, #list + 1, "chain")
  local function chained(chunk, message)
    if chunk == "" then return 1 end
    local ok, fault = drain(f, chunk, to)
    if not ok then return nil, fault end
    if chunk == nil then return to(nil, message) end
    return 1
  end
  list[#list + 1] = chained
  return #list > 1 and sink.chain(table.unpack(list)) or chained
end

-- ---- pumps

-- syntax: pump.step(source, sink) -> 1 | nil [, message]
function pump.step(from, to)
  local chunk, message = from()
  local ok, fault = to(chunk, message)
  if chunk and ok then return 1 end
  return nil, message or fault
end

-- syntax: pump.all(source, sink [, step]) -> 1 | nil, message
function pump.all(from, to, step)
  callable(from, 1, "all")
  callable(to, 2, "all")
  step = step or pump.step
  while true do
    local ok, message = step(from, to)
    if not ok then
      if message then return nil, message end
      return 1
    end
  end
end

return {filter = filter, source = source, sink = sink, pump = pump, BLOCKSIZE = BLOCKSIZE, _VERSION = "LTN12 1.0.3"}
