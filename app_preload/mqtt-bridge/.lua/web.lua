-- HTTP: POST topics/TOPIC publishes the body, GET topics/TOPIC returns the newest message.

local map, value_of = appreq "map", appreq "values"
local MAX_BYTES <const> = 65520

local function rule_of(rules, topic)
   for _, rule in ipairs(rules) do
      if topic:sub(1, #rule.smq) == rule.smq then return rule end
   end
end

local function body_of(request)
   local parts, size = {}, 0
   for part in request:rawrdr(16384) do
      parts[#parts + 1], size = part, size + #part
      if size > MAX_BYTES then return nil end
   end
   return table.concat(parts)
end

local function post(request, response, rules, topic, publish)
   -- A page of another site must not publish with the login of its visitor.
   if request:header "Sec-Fetch-Site" == "cross-site" then return response:senderror(403, "Requests of other sites may not publish.") end
   local data = body_of(request)
   if not data then return response:senderror(413, "A message has at most 65520 bytes.") end
   local mapped, why = map(rules, "out", topic, data)
   if mapped == nil then return response:senderror(404, "No rule of the bridge publishes to this topic.") end
   if not mapped then return response:senderror(400, "The message is not published: " .. why) end
   publish(topic, request:data "subtopic", data)
   response:setstatus(204)
end

-- Return the directory function. publish(topic, subtopic, data) publishes to SMQ and MQTT.
return function(smq, rules, publish)
   return function(_ENV, topic)
      local rule = rule_of(rules, topic)
      if topic == "" then return false end
      if not rule then return response:senderror(404, "The bridge has no rule for this topic.") end
      if request:method() == "POST" then return post(request, response, rules, topic, publish) end
      request:allow {"GET", "POST"}
      local data = value_of(smq, topic)
      if not data then return response:senderror(404, "This topic has no message.") end
      response:setheader("X-Content-Type-Options", "nosniff", "Cache-Control", "no-store")
      response:setcontenttype(rule.data == "json" and "application/json" or "application/octet-stream")
      response:write(data)
   end
end
