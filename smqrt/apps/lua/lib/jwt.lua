-- require "jwt": JSON Web Tokens (spec: bas-api §12).
local core = ...

local arg, find, rawtype, type = core.arg, string.find, core.rawtype, core.type
local call, key_of, py = core.keys.call, core.keys.key_of, core.keys.py

local LEEWAY_S <const> = 60 -- for differences between clocks

-- Kind and texts of a secret, which is a shared secret, a key in PEM format, or a table of a key's numbers.
local function secret_of(value, index, fname)
  if type(value) == "table" and rawtype(value.k) == "string" then return "secret", ba.b64decode(value.k) end -- a JSON Web Key
  if type(value) == "table" then return key_of(value, index, fname) end
  value = core.octets(value, index, fname)
  return find(value, "-----BEGIN ", 1, true) and "pem" or "secret", value
end

local function json_of(value, index, fname)
  if rawtype(value) == "string" then return value end
  local text, message = ba.json.encode(arg.table(value, index, fname))
  if not text then core.raise("bad argument #" .. index .. " to '" .. fname .. "' (" .. tostring(message) .. ")") end
  return text
end

local jwt = {}

-- syntax: jwt.sign(payload, secret [, {alg = "HS256", kid =, typ =}]) -> token | nil, error
function jwt.sign(payload, secret, op)
  payload = json_of(payload, 1, "sign")
  local kind, text, more = secret_of(secret, 2, "sign")
  if rawtype(op) == "string" then op = {alg = op} end
  op = arg.optional(arg.table, op, {}, 3, "sign")
  local header = {}
  for name, value in pairs(type(op.header) == "table" and op.header or {}) do header[name] = value end
  header.kid, header.typ = op.kid or header.kid, op.typ or header.typ
  for _, name in ipairs{"kid", "typ"} do 
    header[name] = arg.optional(arg.string, header[name], nil, name, "sign")
    if header[name] and not utf8.len(header[name]) then core.broken_rule(name, "sign", "UTF-8 expected") end
  end
  return call("token_sign", text, kind, text, more, payload, arg.optional(arg.string, op.alg, nil, "alg", "sign"), ba.json.encode(header))
end

-- The error word for a token that is not valid at this time; nil for a valid one.
local function untimely(payload, now_s)
  local last_s, first_s = payload.exp, payload.nbf
  if last_s ~= nil and (rawtype(last_s) ~= "number" or now_s >= last_s + LEEWAY_S) then return "expired" end
  if first_s ~= nil and (rawtype(first_s) ~= "number" or now_s < first_s - LEEWAY_S) then return "notyetvalid" end
end

local function verified(header, payload)
  if not header then return nil, payload end
  payload = ba.json.decode(payload)
  if not payload then return nil, "failed", "the payload is not a JSON object" end
  local word = untimely(payload, os.time())
  if word then return nil, word end
  -- The header also contains the claims, for callers that use only the first result.
  return setmetatable(ba.json.decode(header), {__index = payload}), payload
end

-- The secret with the identifier `kid`, from a table by identifiers or a set of JSON Web Keys.
local function secret_by_id(secrets, kid)
  if type(secrets.keys) ~= "table" then return secrets[kid] end
  for _, key in ipairs(secrets.keys) do
    if type(key) == "table" and key.kid == kid then return key end
  end
end

-- syntax: jwt.verify(token, secret [, usekid]) -> header, payload | nil, error
-- usekid: secret is a table of secrets by the header field "kid", or a set of JSON Web Keys: {keys = {...}}.
function jwt.verify(token, secret, usekid)
  token = arg.string(token, 1, "verify")
  if usekid then
    local kid, message, detail = py.token_key(token)
    if message then return nil, message, detail end
    secret = kid and secret_by_id(arg.table(secret, 2, "verify"), kid)
    if secret == nil then return nil, "notfound", "there is no key " .. tostring(kid) end
  end
  local kind, text, more = secret_of(secret, 2, "verify")
  return verified(call("token_verify", text, kind, text, more, token))
end

return jwt
