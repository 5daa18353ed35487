-- ba.tpm: keys of this machine, which applications use but can't read (spec: bas-api §5, §7, §17).
local core, py = ...

local arg, call, isyieldable, octets, rawtype, type = core.arg, core.keys.call, core.isyieldable, core.octets, core.rawtype, core.type
local setmetatable, sort = setmetatable, table.sort

local MAX_USERS <const> = 1000 -- the whole database is rewritten for each change
local IV_BYTES <const>, TAG_BYTES <const> = 12, 16

ba.tpm = {}

local is_loaded = false

local function in_thread(name) return py[isyieldable() and name .. "_in_thread" or name] end

-- Reads or creates the key file at the first call. -> true | nil, error, text
local function load_keys()
  if is_loaded then return true end
  local ok, word, detail = in_thread "load"()
  is_loaded = ok == true
  return ok, word, detail
end

local function derive(fname, unique, name, length)
  name, length = octets(name, 1, fname), arg.positive(length, 2, fname)
  local ok, word, detail = load_keys()
  if not ok then return nil, word, detail end
  return py.derive(name, length, unique)
end

-- syntax: ba.tpm.uniquekey(name, length) -> bytes | nil, error        of this machine
function ba.tpm.uniquekey(name, length) return derive("uniquekey", true, name, length) end

-- syntax: ba.tpm.globalkey(name, length) -> bytes | nil, error        of all machines with the same "global" in their key file
function ba.tpm.globalkey(name, length) return derive("globalkey", false, name, length) end

-- syntax: ba.tpm.haskey(name) -> boolean | nil, error
function ba.tpm.haskey(name)
  name = arg.string(name, 1, "haskey")
  local ok, word, detail = load_keys()
  if not ok then return nil, word, detail end
  return py.has(name)
end

-- syntax: ba.tpm.createkey(name [, {key = "ecc" | "rsa", bits =, curve =}]) -> true | nil, error
function ba.tpm.createkey(name, op)
  name, op = arg.string(name, 1, "createkey"), arg.optional(arg.table, op, nil, 2, "createkey")
  local ok, word, detail = load_keys()
  if not ok then return nil, word, detail end
  if py.has(name) then return nil, "exist" end
  return in_thread "add"(name, core.keys.generate(op, "createkey"))
end

-- Returns a private key as PEM text, which must not reach applications. -> text | nil, error, text
local function key_of(name, fname)
  name = arg.string(name, 1, fname)
  local ok, word, detail = load_keys()
  if not ok then return nil, word, detail end
  return py.pem(name)
end

-- Returns the key's name and the data of two arguments, which applications pass in either order.
local function name_and_data(first, second)
  if rawtype(first) == "number" then first = tostring(first) end
  if rawtype(second) == "number" then second = tostring(second) end
  if rawtype(first) ~= "string" then return second, first end
  if rawtype(second) == "string" and load_keys() and not py.has(first) and py.has(second) then return second, first end
  return first, second
end

-- syntax: ba.tpm.createcsr(name, distinguished name [, uses] [, key uses] [, names]) -> PEM text | nil, error
function ba.tpm.createcsr(name, ...)
  local key, word, detail = key_of(name, "createcsr")
  if not key then return nil, word, detail end
  return call("request", key, key, core.keys.request_fields("createcsr", ...))
end

-- syntax: ba.tpm.sign(name, data [, {hash =, padding =}]) -> signature | nil, error
function ba.tpm.sign(name, data, op)
  name, data = name_and_data(name, data)
  local key, word, detail = key_of(name, "sign")
  if not key then return nil, word, detail end
  local hash, padding = core.keys.options(op, 3, "sign")
  return call("sign", key, key, octets(data, 2, "sign"), hash, padding)
end

-- syntax: ba.tpm.jwtsign(name, payload [, {alg =, kid =}]) -> token | nil, error
function ba.tpm.jwtsign(name, payload, op)
  name, payload = name_and_data(name, payload)
  local key, word, detail = key_of(name, "jwtsign")
  if not key then return nil, word, detail end
  return require "jwt".sign(payload, key, op)
end

-- syntax: ba.tpm.keyparams(name) -> x, y | n, e | nil, error
function ba.tpm.keyparams(name)
  local key, word, detail = key_of(name, "keyparams")
  if not key then return nil, word, detail end
  return call("keyparams", key, "pem", key, nil)
end

-- syntax: ba.tpm.sharkcert(name, certificate) -> certificate for TLS | nil, error
function ba.tpm.sharkcert(name, certificate)
  name, certificate = name_and_data(name, certificate)
  local key, word, detail = key_of(name, "sharkcert")
  if not key then return nil, word, detail end
  return core.tls.identity(arg.string(certificate, 2, "sharkcert"), key)
end

-- ---- users whose database is encrypted

local function cipher_of(key, iv) return ba.crypto.symmetric("GCM", key, iv) end

local function sealed(key, users)
  local iv = ba.rndbs(IV_BYTES)
  local data, tag = cipher_of(key, iv):encrypt(ba.json.encode(users))
  return ba.b64urlencode(iv .. tag .. data)
end

local function opened(key, text)
  local data = ba.b64decode(text)
  if #data < IV_BYTES + TAG_BYTES then return nil end
  local tag = data:sub(IV_BYTES + 1, IV_BYTES + TAG_BYTES)
  local plain = cipher_of(key, data:sub(1, IV_BYTES)):decrypt(data:sub(IV_BYTES + TAG_BYTES + 1), tag)
  return plain and ba.json.decode(plain)
end

local function names_of(users)
  local names = {}
  for name in pairs(users) do names[#names + 1] = name end
  sort(names)
  return names
end

-- Returns an entry of `ba.create.jsonuser` for a password or an entry.
local function entry_of(pwd)
  if pwd == nil or type(pwd) == "table" then return pwd end
  return {pwd = arg.string(pwd, 2, "setuser")}
end

-- syntax: ba.tpm.jsonuser(key [, global]) -> {users =, setuser =, setdb =, getauth =} | nil, error
-- key: the name of the encryption key; global: whether it is a key of `globalkey`, not of `uniquekey`.
function ba.tpm.jsonuser(key, global)
  global = arg.optional(arg.boolean, global, false, 2, "jsonuser")
  local secret, word, detail = derive("jsonuser", not global, "jsonuser " .. octets(key, 1, "jsonuser"), 32)
  if not secret then return nil, word, detail end
  local users, database = {}, ba.create.jsonuser()

  local function replace_users(new)
    local ok, message = database:set(new)
    if not ok then return nil, message end
    users = new
    return true
  end

  local self = {}

  -- syntax: t.users() -> list of names
  function self.users() return names_of(users) end

  -- syntax: t.setuser(name [, password]) -> encrypted database | nil, error        without a password: removes the user
  function self.setuser(name, pwd)
    name = arg.string(name, 1, "setuser")
    local new = {} -- a copy: the database must be unchanged after an error
    for other, entry in pairs(users) do new[other] = entry end
    new[name] = entry_of(pwd)
    if #names_of(new) > MAX_USERS then return nil, "mem", "more than " .. MAX_USERS .. " users" end
    local ok, message = replace_users(new)
    if not ok then return nil, message end
    return sealed(secret, users)
  end

  -- syntax: t.setdb(encrypted database) -> true | nil, error
  function self.setdb(text)
    local new = opened(secret, arg.string(text, 1, "setdb"))
    if type(new) ~= "table" then return nil, "failed" end
    return replace_users(new)
  end

  -- syntax: t.getauth() -> user database for ba.create.authenticator
  function self.getauth() return database end

  return self
end
