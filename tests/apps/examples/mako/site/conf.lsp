<?lsp
local conf = require "loadconf"
response:json{
   key = app.settings.key, door = app.settings.doors[2], log = conf.log.smtp.port, greeting = app.greet"Ann",
   absent = conf.print == nil and conf.nothing == nil, same = conf == require "loadconf", verbose = app.words["-verbose"] or false,
   file = mako.cfgfname:match"[^/]*$", dir = mako.cfgdir == mako.cwd, udb = mako.udb == nil, port = mako.port, sslport = mako.sslport,
   pgsql = select(2, pcall(require, "pgsql")), certs = mako.loadcerts(),
}
?>
