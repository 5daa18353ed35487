-- Opaque tokens (spec: bas-api §7): ba.aeskey, ba.aesencode, ba.aesdecode.
local core, py = ...

local arg = core.arg

--- ba.aeskey([16|32]): a random key of so many bytes, 32 by default.
function ba.aeskey(size)
  return py.new_key(arg.optional(arg.integer, size, 32, 1, "aeskey"))
end

--- ba.aesencode(key, s [,withlen]): a URL-safe token of s. `withlen` is accepted: the length is always kept.
function ba.aesencode(key, text, withlen)
  arg.optional(arg.boolean, withlen, true, 3, "aesencode")
  return py.seal(arg.string(key, 1, "aesencode"), arg.string(text, 2, "aesencode"))
end

--- ba.aesdecode(key, token): the text, nil when the token is damaged or of another key.
function ba.aesdecode(key, token)
  return py.unseal(arg.string(key, 1, "aesdecode"), arg.string(token, 2, "aesdecode"))
end
