-- Traffic of the bridge for the page: counts and the latest messages. Updates are published in batches, not for each message.

local MAX_STORED <const>, MAX_NEWS <const>, PREVIEW_BYTES <const> = 40, 20, 160

local flow = {counts = {["in"] = 0, out = 0, dropped = 0, queued = 0}, latest = {}}
local fresh, changed = {}, false

-- Set the number of messages that wait for the broker.
function flow.set_queued(count)
   changed = changed or count ~= flow.counts.queued
   flow.counts.queued = count
end

local function preview(data)
   if not utf8.len(data) then return #data .. " bytes" end
   if #data <= PREVIEW_BYTES then return data end
   return data:sub(1, (utf8.offset(data, 0, PREVIEW_BYTES))- 1) .. " …"
end

-- Count and store a message. `why`: the reason why it was not forwarded, else nil.
function flow.note(way, mqtt, smq, data, why)
   local kind = why and "dropped" or way
   flow.counts[kind] = flow.counts[kind] + 1
   local item = {way = way, mqtt = mqtt, smq = smq, text = preview(data), size = #data, why = why, time = os.time()}
   table.insert(flow.latest, item)
   if #flow.latest > MAX_STORED then table.remove(flow.latest, 1) end
   fresh[#fresh + 1] = item
   if #fresh > MAX_NEWS then table.remove(fresh, 1) end
   changed = true
end

-- Return the counts and the messages since the last call; nil when there are none.
function flow.news()
   if not changed then return nil end
   local items = fresh
   fresh, changed = {}, false
   return {counts = flow.counts, items = items}
end

return flow
