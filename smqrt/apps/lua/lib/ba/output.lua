-- Output of a page: strings in a table, passed to Python as one string at the end, or beyond 8 KiB.
local core, py = ...

local concat, remove, isyieldable = table.concat, table.remove, core.isyieldable

local LIMIT_BYTES <const> = 8192
local MAX_FREE <const>, MAX_FREE_PARTS <const> = 16, 1024

-- Tables of finished exchanges, with their last strings: a table that grows again for each page is most of its garbage.
local free = {}

-- The output of an exchange, as three functions:
--   append(text)   adds text; calls exchange:refuse() instead once exchange.closed is set
--   take(is_last)  returns the contents, or nil, and starts again; is_last: exchange.closed is set, and nothing is added any more
--   peek()         returns the contents, and their size in bytes
-- Functions instead of fields: a page calls append for every piece of text.
function core.output(exchange)
  local parts, count, size = remove(free) or {}, 0, 0

  local function take(is_last)
    local text = count > 0 and concat(parts, "", 1, count) or nil
    if count > MAX_FREE_PARTS or size > 2 * LIMIT_BYTES then parts = {} end -- not kept: the table or its strings are large
    if is_last and #free < MAX_FREE then
      free[#free + 1] = parts
      parts = nil
    end
    count, size = 0, 0
    return text
  end

  local function append(text)
    if exchange.closed then return exchange:refuse() end
    local at, bytes = count + 1, size + #text
    parts[at], count, size = text, at, bytes
    if bytes <= LIMIT_BYTES then return end
    if exchange.filter then
      exchange.filter(take())
    elseif isyieldable() then -- else kept until Python can be called
      exchange.closed = not py.write(exchange.handle, take()) -- write fails when the client has disconnected
    end
  end

  return append, take, function() return count > 0 and concat(parts, "", 1, count) or "", size end
end
