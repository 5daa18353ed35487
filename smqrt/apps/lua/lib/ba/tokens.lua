-- Opaque tokens: ba.aeskey, ba.aesencode, ba.aesdecode (spec: bas-api §7).
local core, py = ...

local arg = core.arg

--- ba.aeskey([16|32]): returns a random key with this number of bytes, by default 32.
function ba.aeskey(size)
  return py.new_key(arg.optional(arg.integer, size, 32, 1, "aeskey"))
end

--- ba.aesencode(key, s [,withlen]): returns a URL-safe token of s. `withlen` is ignored: the token always keeps the length.
function ba.aesencode(key, text, withlen)
  arg.optional(arg.boolean, withlen, true, 3, "aesencode")
  return py.seal(arg.string(key, 1, "aesencode"), arg.string(text, 2, "aesencode"))
end

--- ba.aesdecode(key, token): returns the text, nil when the token is damaged or was made with another key.
function ba.aesdecode(key, token)
  return py.unseal(arg.string(key, 1, "aesdecode"), arg.string(token, 2, "aesdecode"))
end
