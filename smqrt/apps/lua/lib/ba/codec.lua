-- Base64, percent-encoding, dates, content types, compression (spec: bas-api §7).
local core, py = ...

local arg, isyieldable = core.arg, core.isyieldable

local LARGE_BYTES <const> = 1 << 17 -- encoding them takes 5 to 10 ms

local function is_large(text) return #text > LARGE_BYTES and isyieldable() end

-- Each takes one string and returns a string.
for _, name in ipairs {"b64encode", "b64decode", "mime"} do
  local convert = py[name]
  ba[name] = function(text) return convert(arg.string(text, 1, name)) end
end

for _, name in ipairs {"urlencode", "urldecode"} do
  local convert, convert_large = py[name], py[name .. "_large"]
  ba[name] = function(text)
    text = arg.string(text, 1, name)
    return (is_large(text) and convert_large or convert)(text)
  end
end

--- ba.b64urlencode(s [,pad]): returns base64 in the URL-safe alphabet. pad: with "=" at the end.
function ba.b64urlencode(text, pad)
  return py.b64urlencode(arg.string(text, 1, "b64urlencode"), arg.optional(arg.boolean, pad, false, 2, "b64urlencode"))
end

--- ba.deflate(s [,gzip]): returns s compressed for Content-Encoding deflate or gzip.
function ba.deflate(text, gzip)
  text = arg.string(text, 1, "deflate")
  return (is_large(text) and py.deflate_large or py.deflate)(text, arg.optional(arg.boolean, gzip, false, 2, "deflate"))
end

--- ba.encdate([seconds]): returns the date of an HTTP header for a Unix time, by default now.
function ba.encdate(seconds)
  return py.encdate(arg.optional(arg.time, seconds, os.time(), 1, "encdate"))
end

--- ba.parsedate(text): returns the Unix time of a date, nil when the text is not a date.
function ba.parsedate(text)
  return py.parsedate(arg.string(text, 1, "parsedate"))
end
