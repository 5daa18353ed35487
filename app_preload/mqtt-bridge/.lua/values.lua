-- Newest messages of topics, for HTTP. The hub keeps them; the first request for a topic subscribes to it.

local MAX_TOPICS <const> = 256 -- the one that was requested first is forgotten for a new one
local WAIT_MS <const>, WAITS <const> = 5, 20

local entries, order = {}, {}

local function subscribed(smq, topic)
   if #order == MAX_TOPICS then
      local oldest = table.remove(order, 1)
      smq:unsubscribe(oldest)
      entries[oldest] = nil
   end
   local entry = {}
   entries[topic], order[#order + 1] = entry, topic
   smq:subscribe(topic, {onmsg = function(data) entry.data = data end})
   for _ = 1, WAITS do
      if entry.data then break end
      ba.sleep(WAIT_MS)
   end
   return entry
end

-- Return the newest message of a topic; nil without one.
return function(smq, topic)
   local data = (entries[topic] or subscribed(smq, topic)).data
   return data ~= "" and data or nil
end
