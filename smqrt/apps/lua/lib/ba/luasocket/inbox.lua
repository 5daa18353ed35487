-- Received bytes that a TCP object of the LuaSocket layer has not read yet: pieces, of which the first may be partly read.
local core = ...

local concat, find, setmetatable, sub = table.concat, string.find, setmetatable, string.sub

local SMALL_BYTES <const> = 4096 -- smaller pieces are joined, so that single bytes do not need an entry each

local inbox = {}
local class = {__index = inbox}

--- Returns an empty inbox. `size` is the number of its bytes.
function core.luasocket.inbox()
  return setmetatable({pieces = {}, first = 1, last = 0, at = 1, size = 0}, class)
end

function inbox:add(data)
  local pieces, last = self.pieces, self.last
  if last > self.first and #data + #pieces[last] <= SMALL_BYTES then
    pieces[last] = pieces[last] .. data
  else
    last = last + 1
    pieces[last], self.last = data, last
  end
  self.size = self.size + #data
end

local function drop_first(self)
  self.pieces[self.first] = nil
  self.first, self.at = self.first + 1, 1
end

--- Removes and returns `count` bytes; the inbox must have them.
function inbox:take(count)
  local parts, pieces = {}, self.pieces
  self.size = self.size - count
  while count > 0 do
    local piece, at = pieces[self.first], self.at
    local left = #piece - at + 1
    if left > count then
      parts[#parts + 1] = sub(piece, at, at + count - 1)
      self.at = at + count
      break
    end
    parts[#parts + 1] = at == 1 and piece or sub(piece, at)
    drop_first(self)
    count = count - left
  end
  return concat(parts)
end

--- Returns the length of the first line with its end, nil when the end has not arrived.
-- state: the position reached, so that repeated calls examine each byte once; initially empty.
function inbox:line_bytes(state)
  local number, from = state.number or self.first, state.from or self.at
  local before = state.before or 1 - self.at
  while number <= self.last do
    local piece = self.pieces[number]
    local stop = find(piece, "\n", from, true)
    if stop then return before + stop end
    if number == self.last then
      state.number, state.from, state.before = number, #piece + 1, before
      return nil
    end
    before, number, from = before + #piece, number + 1, 1
  end
  state.number, state.from, state.before = number, 1, before
end
