-- Mapping of topics between MQTT and SMQ, by the rules.

local MAX_SMQ_BYTES <const> = 65520

local function begins(text, prefix) return text:sub(1, #prefix) == prefix end

local function fits(rule, data)
   return rule.data ~= "json" or data == "" or ba.json.decode(data) ~= nil -- an empty message deletes a retained one
end

-- map(rules, "in" | "out", topic, data) -> topic on the other side | nil when no rule applies | false, reason why it is not forwarded
return function(rules, way, topic, data)
   local from, to = "smq", "mqtt"
   if way == "in" then from, to = to, from end
   for _, rule in ipairs(rules) do
      if (rule.way == way or rule.way == "both") and begins(topic, rule[from]) then
         if not fits(rule, data) then return false, "not JSON" end
         if way == "in" and #data > MAX_SMQ_BYTES then return false, "too large for SMQ" end
         local mapped = rule[to] .. topic:sub(#rule[from] + 1)
         if mapped == "" or (way == "out" and mapped:find "[+#%z]") then return false, "not an MQTT topic" end
         return mapped, rule
      end
   end
end
