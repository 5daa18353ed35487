-- The variables of mako.conf as a table, with load() to read the file again (spec: runtime §1.2).
local core = ...

return core.loadconf.get()
