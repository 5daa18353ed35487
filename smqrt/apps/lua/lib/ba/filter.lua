-- Response filters, which pass the output of a page to a function or collect it (spec: bas-api §2.2).
local core, py = ...

local concat, setmetatable = table.concat, setmetatable

local exchange = core.exchange
local methods = exchange.methods

local filter = {}
local class = core.class("responsefilter", filter)

local function remove(self)
  local owner = self.owner
  if owner.filter ~= self.call then core.raise("the response filter has ended") end
  local rest = owner.take()
  owner.filter = nil
  return rest, owner
end

-- syntax: filter:finalize([send])      Ends the filter. A function receives the remaining output, then nil.
-- Collected output is compressed: with send it becomes the response, otherwise it is returned.
function filter:finalize(send)
  local rest, owner = remove(self)
  if rest then self.call(rest) end
  self.call(nil)
  if not self.collected then return true end
  local compressed = ba.deflate(concat(self.collected))
  if not send then return compressed end
  owner:setheader("Content-Encoding", "deflate")
  exchange.seal(owner, compressed)
  return true
end

-- Ends the filter and drops the output.
function filter:abort()
  remove(self)
  return true
end

function class:__close()
  if self.owner.filter == self.call then self:abort() end
end

-- syntax: response:setresponse([f]) -> filter      f(text) receives output, f(nil) its end; without f output is collected
function methods:setresponse(f)
  local handle = exchange.handle_of(self)
  if self.filter or py.committed(handle) then core.raise("iscommitted") end
  local collected
  if core.rawtype(f) ~= "function" then
    collected = {}
    f = function(text) collected[#collected + 1] = text end
  end
  self:reset()
  self.filter = f
  return setmetatable({owner = self, call = f, collected = collected}, class)
end
