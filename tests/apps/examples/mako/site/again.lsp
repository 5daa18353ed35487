<?lsp
local conf = require "loadconf"
local rw = require "rwfile"
local home, name = ba.openio "home", "mako.conf"
local text = assert(rw.file(home, name))
assert(rw.file(home, name, text .. "\nadded = {1, 2}\nlog = nil\n"))
assert(conf.load() == conf and #conf.added == 2 and conf.log == nil and conf.cinfo)
assert(rw.file(home, name, "added ="))
local done, message = conf.load()
assert(done == nil and message:find"^mako.conf:1: ", message)
assert(#conf.added == 2 and type(conf.load) == "function", "all as it was")
assert(home:remove(name))
assert(conf:load() == conf and conf.cinfo == nil and conf.load, "no file, an empty table")
print "ok"
?>
