-- Topic names and topic filters (MQTT 5 §4.7).

local byte, find, gmatch, gsub, sub = string.byte, string.find, string.gmatch, string.gsub, string.sub

local MAX_LEVELS <const> = 128 -- a filter of 65,535 slashes would use megabytes of memory

local topics = {MAX_LEVELS = MAX_LEVELS}

--- Whether a topic name is valid: not empty, and without wildcards.
function topics.is_name(topic)
  return topic ~= "" and not find(topic, "[+#]")
end

local function hash_is_last_level(filter)
  local at = find(filter, "#", 1, true)
  return not at or at == #filter and (at == 1 or sub(filter, at - 1, at - 1) == "/")
end

--- Whether a topic filter is valid, and has at most 128 levels.
function topics.is_filter(filter)
  if filter == "" or not hash_is_last_level(filter) then return false end
  local levels = 0
  for level in gmatch(filter, "[^/]*") do
    if level ~= "+" and find(level, "+", 1, true) then return false end
    levels = levels + 1
    if levels > MAX_LEVELS then return false end
  end
  return true
end

--- The number of levels of a topic or filter.
function topics.levels(topic)
  return select(2, gsub(topic, "/", "/")) + 1
end

function topics.has_wildcard(filter)
  return find(filter, "[+#]") ~= nil
end

--- Whether a filter is for a shared subscription.
function topics.is_shared(filter)
  return sub(filter, 1, 7) == "$share/" or filter == "$share"
end

--- Whether a topic begins with "$": wildcards at the first level do not match it.
function topics.is_internal(topic)
  return byte(topic) == 0x24
end

return topics
