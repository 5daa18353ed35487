-- Keys: signatures, encryption, certificates. The module jwt and ba.tpm use them as well (spec: bas-api §7, §10).
local core, py = ...

local arg, find, gsub, isyieldable, mathtype = core.arg, string.find, string.gsub, core.isyieldable, math.type
local pack, pairs, pcall, rawtype, time, type = string.pack, pairs, pcall, core.rawtype, os.time, core.type
local dump, octets = core.table_codec.dump, core.octets

local LONG_BYTES <const> = 1000 -- private RSA keys and certificates are longer; an operation with an RSA key may take half a second

core.keys = {py = py}

--- Calls py[name], in a thread when `text` is a long key.
local function call(name, text, ...)
  local in_thread = #text >= LONG_BYTES and isyieldable()
  return py[in_thread and name .. "_in_thread" or name](...)
end
core.keys.call = call

local function is_pem(value) return rawtype(value) == "string" and find(value, "-----BEGIN ", 1, true) ~= nil end

-- Returns a number of a raw key as bytes. encoded: it is in base64, as in JSON Web Keys.
local function raw(value, name, encoded, fname)
  if mathtype(value) == "integer" then return (gsub(pack(">I8", value), "^%z+", "")) end
  if rawtype(value) ~= "string" then core.raise("bad key for '" .. fname .. "' (" .. name .. " must be a string)") end
  return encoded and ba.b64decode(value) or value
end

--- A public or private key -> its kind and one or two texts: "pem", or "curve" with x and y, or "rsa" with n and e.
local function key_of(value, index, fname)
  if type(value) ~= "table" then return "pem", octets(value, index, fname) end
  local encoded = value.kty ~= nil
  if value.x and value.y then return "curve", raw(value.x, "x", encoded, fname), raw(value.y, "y", encoded, fname) end
  if value.n and value.e then return "rsa", raw(value.n, "n", encoded, fname), raw(value.e, "e", encoded, fname) end
  core.bad_argument(index, fname, "key in PEM format, {x, y} or {n, e}", value)
end
core.keys.key_of = key_of

local function is_key(value) return type(value) == "table" or is_pem(value) end

-- Returns key and data of two arguments, which applications pass in either order.
local function key_and_data(first, second, fname)
  if is_key(first) and not is_key(second) then first, second = second, first end
  return second, octets(first, 1, fname)
end

local function option(op, name, default, fname)
  return arg.optional(arg.string, op[name], default, name, fname)
end

local function options(op, index, fname)
  op = arg.optional(arg.table, op, {}, index, fname)
  return option(op, "hash", option(op, "hashid", nil, fname), fname), option(op, "padding", "pkcs1", fname)
end
core.keys.options = options

-- syntax: ba.crypto.sign(data, key [, {hash = "sha256", padding = "pkcs1" | "pss"}]) -> signature | nil, error
function ba.crypto.sign(data, key, op)
  key, data = key_and_data(data, key, "sign")
  key = octets(key, 2, "sign")
  local hash, padding = options(op, 3, "sign")
  return call("sign", key, key, data, hash, padding)
end

-- Returns the key among three arguments, then the two others in their order.
local function key_of_three(first, second, third)
  if is_key(third) then return third, first, second end
  if is_key(second) then return second, first, third end
  if is_key(first) then return first, second, third end
  return third, first, second
end

-- syntax: ba.crypto.verify(data, signature, key [, {hash = "sha256", padding = "pkcs1" | "pss"}]) -> boolean | nil, error
function ba.crypto.verify(data, signature, key, op)
  key, data, signature = key_of_three(data, signature, key)
  data, signature = octets(data, 1, "verify"), octets(signature, 2, "verify")
  local kind, text, more = key_of(key, 3, "verify")
  local hash, padding = options(op, 4, "verify")
  return call("verify", text, kind, text, more, data, signature, hash, padding)
end

-- syntax: ba.crypto.sigparams(signature) -> r, s | nil, error
function ba.crypto.sigparams(signature)
  return py.sigparams(octets(signature, 1, "sigparams"))
end

-- syntax: ba.crypto.keyparams(key) -> x, y | n, e | nil, error
function ba.crypto.keyparams(key)
  local kind, text, more = key_of(key, 1, "keyparams")
  return call("keyparams", text, kind, text, more)
end

-- syntax: ba.crypto.keysize(key) -> bytes | nil, error
function ba.crypto.keysize(key)
  local kind, text, more = key_of(key, 1, "keysize")
  return call("keysize", text, kind, text, more)
end

-- syntax: ba.crypto.encrypt(data, key [, {padding = "pkcs1" | "oaep", hash = "sha256"}]) -> ciphertext | nil, error
function ba.crypto.encrypt(data, key, op)
  key, data = key_and_data(data, key, "encrypt")
  local kind, text, more = key_of(key, 2, "encrypt")
  local hash, padding = options(op, 3, "encrypt")
  return call("encrypt", text, kind, text, more, data, padding, hash)
end

-- syntax: ba.crypto.decrypt(ciphertext, key [, op]) -> data | nil, error
function ba.crypto.decrypt(data, key, op)
  key, data = key_and_data(data, key, "decrypt")
  key = octets(key, 2, "decrypt")
  local hash, padding = options(op, 3, "decrypt")
  return call("decrypt", key, key, data, padding, hash)
end

-- ---- certificates

--- Generates a private key with the options of `ba.create.key`. -> PEM text
local function generate(op, fname)
  op = arg.optional(arg.table, op, {}, 1, fname)
  local kind = string.lower(option(op, "key", op.bits and "rsa" or "ecc", fname))
  if kind == "ec" or kind == "ecdsa" then kind = "ecc" end
  local bits = arg.optional(arg.integer, op.bits, 2048, "bits", fname)
  local make = kind == "rsa" and isyieldable() and py.generate_in_thread or py.generate
  return make(kind, bits, option(op, "curve", "SECP256R1", fname))
end
core.keys.generate = generate

-- syntax: ba.create.key([{key = "ecc" | "rsa", bits = 2048, curve = "SECP256R1"}]) -> PEM text
function ba.create.key(op)
  return generate(op, "key")
end

-- Returns the words of lists and of strings with commas or semicolons: uses and names of a certificate request.
local function words_of(fname, ...)
  local words = {}
  for at = 1, select("#", ...) do
    local value = select(at, ...)
    if type(value) == "table" then
      for _, word in ipairs(value) do words[#words + 1] = arg.string(word, at + 2, fname) end
    elseif value ~= nil then
      for word in string.gmatch(arg.string(value, at + 2, fname), "[^,;%s]+") do words[#words + 1] = word end
    end
  end
  return words
end

--- Returns the name and the options of a certificate request, encoded for Python.
local function request_fields(fname, name, ...)
  local parts = {}
  for part, value in pairs(arg.table(name, 2, fname)) do
    if part ~= "subjectaltnames" then parts[arg.string(part, 2, fname)] = arg.string(value, 2, fname) end
  end
  return dump(parts), dump(words_of(fname, name.subjectaltnames, ...))
end
core.keys.request_fields = request_fields

-- syntax: ba.create.csr(key, name [, uses] [, key uses] [, names]) -> PEM text | nil, error
function ba.create.csr(key, name, ...)
  key = arg.string(key, 1, "csr")
  return call("request", key, key, request_fields("csr", name, ...))
end

-- Returns the Unix time of a number, a table of os.date "*t", a string that ba.datetime accepts, or a datetime.
local function time_of(value, index, fname)
  if value == nil or tonumber(value) then return tonumber(value) end
  if rawtype(value) == "table" and value.ticks == nil then
    local is_date, seconds = pcall(time, value)
    if not is_date then core.broken_rule(index, fname, seconds) end
    return seconds
  end
  local date, message = value, nil
  if rawtype(value) == "string" then date, message = ba.datetime(value) end
  if not date then core.broken_rule(index, fname, message) end
  if type(date) ~= "userdata" or not date.ticks then core.bad_argument(index, fname, "time", value) end
  return (date:ticks())
end

local function issue(csr, issuer, key, from, to, serial)
  from, to = time_of(from, 3, "certificate"), time_of(to, 4, "certificate")
  serial = arg.optional(arg.integer, serial, nil, 5, "certificate")
  return call("certificate", key, csr, key, issuer, from, to, serial)
end

-- syntax: ba.create.certificate(csr, key [, from [, to [, serial]]])          self-signed: with the request's own key
--         ba.create.certificate(csr, certificate, key [, from [, to [, serial]]]) -> PEM text | nil, error
function ba.create.certificate(csr, first, second, ...)
  csr, first = arg.string(csr, 1, "certificate"), arg.string(first, 2, "certificate")
  if not is_pem(second) then return issue(csr, nil, first, second, ...) end
  if find(second, "-----BEGIN CERTIFICATE-----", 1, true) then first, second = second, first end
  return issue(csr, first, second, ...)
end
