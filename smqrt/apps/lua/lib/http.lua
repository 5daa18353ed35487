-- require "http": the clients of httpc, following redirects (up to nine) and keeping cookies (spec: bas-api §9).
local core = ...

-- syntax: http.create([op]) -> http       op: that of httpc, and defaults for request: header, query, user, password, trusted, ...
local function create(op)
  return core.http.create(op, true)
end

return {create = create, parsequery = core.modules.httpc.parsequery}
