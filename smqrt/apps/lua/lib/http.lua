-- require "http": clients of httpc that follow up to nine redirects and store cookies (spec: bas-api §9).
local core = ...

-- syntax: http.create([op]) -> http       op: the options of httpc, and defaults for request: header, query, user, password, trusted, ...
local function create(op)
  return core.http.create(op, true)
end

return {create = create, parsequery = core.modules.httpc.parsequery}
