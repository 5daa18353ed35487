-- Attributes of messages on their way over the bridge: QoS, expiry and the properties of MQTT 5.

local ceil, max = math.ceil, math.max
local OF_THE_HUB <const> = {topicalias = true, subscriptionidentifier = true, messageexpiryinterval = true}

local attributes = {}

-- The topic for responses on the other side. A response goes the opposite way of the message. Without a rule it stays as it is.
local function response_topic(rules, way, topic)
   local from, to, back = "smq", "mqtt", "in"
   if way == "in" then from, to, back = "mqtt", "smq", "out" end
   for _, rule in ipairs(rules) do
      if (rule.way == back or rule.way == "both") and topic:sub(1, #rule[from]) == rule[from] then
         return rule[to] .. topic:sub(#rule[from] + 1)
      end
   end
   return topic
end

local function passed_on(rules, way, properties)
   local found = {}
   for name, value in pairs(properties) do
      if not OF_THE_HUB[name] then found[name] = value end
   end
   if found.responsetopic then found.responsetopic = response_topic(rules, way, found.responsetopic) end
   return found
end

-- Return the options of `smq:publish` for a message from MQTT, with its properties and its QoS.
function attributes.to_smq(rules, properties, qos)
   local expiry = properties.messageexpiryinterval
   return {qos = qos, expiry = expiry and max(expiry, 1), properties = passed_on(rules, "in", properties)}
end

-- Return the properties of a message to MQTT.
-- mqtt: the attributes of a message of an MQTT client of this server, or nil; mark: see rules.lua; subtopic: its sub-topic, or nil.
function attributes.to_mqtt(rules, mqtt, mark, subtopic)
   local found = passed_on(rules, "out", mqtt and mqtt.properties or {})
   if mqtt and mqtt.expiry then found.messageexpiryinterval = max(ceil(mqtt.expiry), 1) end
   local marks = found.bridge
   if type(marks) ~= "table" then marks = {marks} end
   marks[#marks + 1] = mark
   found.bridge, found.subtopic = marks, subtopic or found.subtopic
   return found
end

-- Return whether a bridge with this mark has passed on a message with these properties.
function attributes.is_marked(properties, mark)
   local marks = properties.bridge
   if type(marks) ~= "table" then return marks == mark end
   for _, one in ipairs(marks) do
      if one == mark then return true end
   end
   return false
end

return attributes
