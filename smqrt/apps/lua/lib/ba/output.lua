-- Output of a page: strings in a table, passed to Python as one string at the end, or beyond 8 KiB.
local core, py = ...

local concat, isyieldable = table.concat, core.isyieldable

local LIMIT_BYTES <const> = 8192

-- The output of an exchange, as three functions:
--   append(text)   adds text; calls exchange:refuse() instead once exchange.closed is set
--   take()         returns the contents, or nil, and starts again
--   peek()         returns the contents, and their size in bytes
-- Functions instead of fields: a page calls append for every piece of text.
function core.output(exchange)
  local parts, count, size = {}, 0, 0

  local function take()
    if count == 0 then return nil end
    local text = concat(parts, "", 1, count)
    count, size = 0, 0
    return text
  end

  local function append(text)
    if exchange.closed then return exchange:refuse() end
    count = count + 1
    parts[count] = text
    size = size + #text
    if size <= LIMIT_BYTES then return end
    if exchange.filter then
      exchange.filter(take())
    elseif isyieldable() then -- else kept until Python can be called
      exchange.closed = not py.write(exchange.handle, take()) -- write fails when the client has disconnected
    end
  end

  return append, take, function() return concat(parts, "", 1, count), size end
end
