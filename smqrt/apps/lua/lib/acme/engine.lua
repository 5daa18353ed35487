-- require "acme/engine": certificates by ACME, RFC 8555 (spec: bas-api §17.1). Orders are made one after the other, by HTTP-01.
local core = ...

local arg, py, raise, setmetatable, xpcall = core.arg, core.acme, core.raise, setmetatable, xpcall

local PRODUCTION <const> = "https://acme-v02.api.letsencrypt.org/directory"
local STAGING <const> = "https://acme-staging-v02.api.letsencrypt.org/directory"
local MOST <const> = 100 -- orders that wait

local queue = ba.thread.create() -- of its own: an order takes minutes at worst
local jobs = 0

local function order(job)
  local account, op = job.account, job.op
  local directory = account.directory or account.production and PRODUCTION or STAGING
  local key, chain, account_key, id =
    py.order(job.domain, directory, account.email or "", account.ca or "", account.key, account.id, op.privkey)
  if key then account.key, account.id = account_key, id end
  return key, chain
end

local Ended = {__close = function() jobs = jobs - 1 end} -- also when the job is ended in the middle

-- An error of the callback is logged and has no other effect.
local function work(job)
  local _ <close> = setmetatable({}, Ended)
  local done, message = xpcall(function() job.callback(order(job)) end, core.traceback)
  if not done then core.log_error("the callback of acme.cert failed: " .. message) end
end

local function check_account(account)
  arg.table(account, 1, "cert")
  for _, field in ipairs{"email", "key", "id", "directory", "ca"} do
    account[field] = arg.optional(arg.string, account[field], nil, "1." .. field, "cert")
  end
end

local acme = {}

-- syntax: acme.cert(account, domain, callback [, {privkey = PEM}])      callback(key, certificate) or callback(nil, error)
-- account: {email =, production =, key =, id =, directory =, ca =}; a new account puts its key and id into it
function acme.cert(account, domain, callback, op)
  check_account(account)
  domain = arg.string(domain, 2, "cert")
  arg["function"](callback, 3, "cert")
  op = arg.optional(arg.table, op, {}, 4, "cert")
  arg.optional(arg.string, op.privkey, nil, "4.privkey", "cert")
  if op.ch ~= nil then raise "bad argument #4.ch to 'cert' (names are verified by HTTP-01 only)" end
  if jobs >= MOST then raise("acme.cert: " .. MOST .. " orders wait already") end
  local job = {account = account, domain = domain, callback = callback, op = op}
  queue:run(function() work(job) end)
  jobs = jobs + 1
  return true
end

-- syntax: acme.jobs() -> how many orders are made or wait
function acme.jobs() return jobs end

return acme
