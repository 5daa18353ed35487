-- Digests and random numbers (spec: bas-api §7).
local core, py = ...

local arg, max, min, raise, setmetatable = core.arg, math.max, math.min, core.raise, setmetatable

ba.crypto = ba.crypto or {}

local LARGE_BYTES <const> = 4 << 20 -- hashing 4 MiB takes some ms
local MAX_RANDOM_BYTES <const> = 1 << 20

local Digest = {__gc = function(digest) if digest.handle then py.drop(digest.handle) end end}

--- ba.crypto.hash(algorithm), ba.crypto.hash("hmac", algorithm, key): returns a function h.
-- h(data) adds data and returns h; h(true [,"binary"|"hex"|"b64"]) returns the digest and begins a new one.
function ba.crypto.hash(algorithm, hmac_algorithm, key)
  local name, secret = arg.string(algorithm, 1, "hash"), nil
  if name == "hmac" then
    name, secret = arg.string(hmac_algorithm, 2, "hash"), arg.string(key, 3, "hash")
  end
  local digest = setmetatable({handle = py.open(name, secret)}, Digest)

  local function step(data, form)
    digest.handle = digest.handle or py.open(name, secret)
    if data ~= true then
      data = arg.string(data, 1, "hash")
      local update = #data > LARGE_BYTES and core.isyieldable() and py.update_large or py.update
      update(digest.handle, data)
      return step
    end
    local value = py.finish(digest.handle, arg.optional(arg.string, form, "binary", 2, "hash"))
    digest.handle = nil
    return value
  end
  return step
end

--- ba.rnd(): returns 0 to 2^32-1; ba.rnd(upper): 1 to upper; ba.rnd(lower, upper): lower to upper, both included.
function ba.rnd(lower, upper)
  if lower == nil then return py.random_unsigned(4) end
  lower = arg.integer(lower, 1, "rnd")
  if upper == nil then lower, upper = 1, lower end
  upper = arg.integer(upper, 2, "rnd")
  local span = upper - lower + 1
  if upper < lower or span <= 0 then raise("bad argument to 'rnd' (interval is empty or too large)") end
  return lower + py.random_below(span)
end

--- ba.rnds(bytes): returns a random integer of 1 to 8 bytes, unsigned up to 7 bytes. Smaller and larger sizes count as 1 and 8.
function ba.rnds(bytes)
  return py.random_unsigned(max(1, min(arg.integer(bytes, 1, "rnds"), 8)))
end

--- ba.rndbs(n): returns a string of n random bytes.
function ba.rndbs(n)
  local count = arg.integer(n, 1, "rndbs")
  if count < 1 or count > MAX_RANDOM_BYTES then raise("bad argument #1 to 'rndbs' (1 to " .. MAX_RANDOM_BYTES .. " expected)") end
  return py.random_bytes(count)
end

--- ba.rndseed(x): accepts and ignores x: the system's generator does not need a seed.
function ba.rndseed(x)
  arg.number(x, 1, "rndseed")
end
