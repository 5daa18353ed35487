-- ba.crypto.symmetric and ba.crypto.PBKDF2 (spec: bas-api §7).
local core, py = ...

local arg, isyieldable, setmetatable, tostring, upper = core.arg, core.isyieldable, setmetatable, tostring, string.upper

local LARGE_BYTES <const> = 1 << 20 -- takes 1 to 2 ms; longer data is processed in turns

local methods = {}
local class = core.class("symmetric", methods)

class.__gc = function(self) py.drop(self.handle) end

--- Returns a string or byte array as a string.
local function octets(value, index, fname)
  return core.is_bytearray(value) and tostring(value) or arg.string(value, index, fname)
end
core.octets = octets

local function is_padded(value, index, fname)
  if value == nil then return false end
  if upper(arg.string(value, index, fname)) ~= "PKCS7" then
    core.raise("bad argument #" .. index .. " to '" .. fname .. "' (\"PKCS7\" expected)")
  end
  return true
end

-- syntax: ba.crypto.symmetric("GCM" | "CCM" | "CBC", key, iv [, "encrypt" | "decrypt"]) -> cipher
function ba.crypto.symmetric(mode, key, iv, direction)
  mode, key, iv = arg.string(mode, 1, "symmetric"), octets(key, 2, "symmetric"), octets(iv, 3, "symmetric")
  local handle = py.open(upper(mode), key, iv, arg.optional(arg.string, direction, nil, 4, "symmetric"))
  return setmetatable({handle = handle, authenticates = upper(mode) ~= "CBC"}, class)
end

local function handle_of(self, fname) return arg.instance(self, class, "self", fname).handle end

-- syntax: cipher:setauth(data) -> true
function methods:setauth(data)
  return py.set_auth(handle_of(self, "setauth"), octets(data, 1, "setauth"))
end

-- syntax: cipher:encrypt(data [, "PKCS7"]) -> ciphertext [, tag]
function methods:encrypt(data, padding)
  local handle = handle_of(self, "encrypt")
  data = octets(data, 1, "encrypt")
  local call = #data > LARGE_BYTES and isyieldable() and py.encrypt_large or py.encrypt
  return call(handle, data, is_padded(padding, 2, "encrypt"))
end

-- syntax: cipher:decrypt(ciphertext [, tag] [, "PKCS7"]) -> data | nil, error
function methods:decrypt(data, tag, padding)
  local handle = handle_of(self, "decrypt")
  data = octets(data, 1, "decrypt")
  if not self.authenticates and padding == nil then tag, padding = nil, tag end
  if tag ~= nil then tag = octets(tag, 2, "decrypt") end
  local call = #data > LARGE_BYTES and isyieldable() and py.decrypt_large or py.decrypt
  return call(handle, data, tag, is_padded(padding, 3, "decrypt"))
end

-- syntax: ba.crypto.PBKDF2(algorithm, password, salt, iterations, length) -> key
function ba.crypto.PBKDF2(algorithm, password, salt, iterations, length)
  return py.pbkdf2(
    arg.string(algorithm, 1, "PBKDF2"), octets(password, 2, "PBKDF2"), octets(salt, 3, "PBKDF2"),
    arg.positive(iterations, 4, "PBKDF2"), arg.positive(length, 5, "PBKDF2"))
end
