<?lsp
local su = require "sqlutil"
if request:method() == "POST" then
   local d = request:data()
   app.add(d.author, d.text, tonumber(d.stars))
   response:sendredirect ""
end
local list, n = {}, 0
for id, author, text, stars in su.iter(app.opendb, "id, author, text, stars FROM notes ORDER BY id") do
   n = n + 1
   list[n] = {id = id, author = author, text = text or "none", stars = stars or "none"}
end
local authors = su.select(app.opendb, "count(DISTINCT author) FROM notes", function(cur) return cur:fetch() end)
local last = su.findt(app.opendb, "* FROM notes ORDER BY id DESC LIMIT 1") or {}
response:json{notes = list, authors = authors, last = last.author or "nobody", logged = su.find(app.opendb, "SELECT count(*) FROM log")}
?>
