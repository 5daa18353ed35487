<?lsp
-- Asks another server: fetch.lsp?how=json|read&url=...
local query = request:data()
local http <close> = require "httpm".create{timeout = 5000}
if query.how == "json" then
   local value, err = http:json(query.url)
   print(type(value), err)
else
   local ok, err = http:request{url = query.url}
   local bytes = 0
   while ok do
      local data, fault = http:read()
      if not data then err = fault break end
      bytes = bytes + #data
   end
   print(bytes, err)
end
?>
