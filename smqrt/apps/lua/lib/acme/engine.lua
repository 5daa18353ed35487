-- require "acme/engine": certificates by ACME, RFC 8555 (spec: bas-api §17.1). Orders are processed in sequence and validated by HTTP-01.
local core = ...

local arg, py, raise, setmetatable, xpcall = core.arg, core.acme, core.raise, setmetatable, xpcall

local PRODUCTION <const> = "https://acme-v02.api.letsencrypt.org/directory"
local STAGING <const> = "https://acme-staging-v02.api.letsencrypt.org/directory"
local MAX_ORDERS <const> = 100 -- queued, the running one included

local queue = ba.thread.create() -- separate from other jobs, since an order may take minutes
local jobs = 0

local function order(job)
  local account, op = job.account, job.op
  local directory = account.directory or account.production and PRODUCTION or STAGING
  local key, chain, account_key, id =
    py.order(job.domain, directory, account.email or "", account.ca or "", account.key, account.id, op.privkey)
  if key then account.key, account.id = account_key, id end
  return key, chain
end

local Ended = {__close = function() jobs = jobs - 1 end} -- also when the job is killed

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
-- account: {email =, production =, key =, id =, directory =, ca =}; key and id are set when a new account is made
function acme.cert(account, domain, callback, op)
  check_account(account)
  domain = arg.string(domain, 2, "cert")
  arg["function"](callback, 3, "cert")
  op = arg.optional(arg.table, op, {}, 4, "cert")
  arg.optional(arg.string, op.privkey, nil, "4.privkey", "cert")
  if op.ch ~= nil then raise "bad argument #4.ch to 'cert' (names are verified by HTTP-01 only)" end
  if jobs >= MAX_ORDERS then raise("acme.cert: limit reached: " .. MAX_ORDERS .. " queued orders") end
  local job = {account = account, domain = domain, callback = callback, op = op}
  queue:run(function() work(job) end)
  jobs = jobs + 1
  return true
end

-- syntax: acme.jobs() -> number of orders, running or queued
function acme.jobs() return jobs end

return acme
