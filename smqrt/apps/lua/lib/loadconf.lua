-- require "loadconf": the variables of mako.conf as a table, and load() to read the file again (spec: runtime §1.2).
local core = ...

return core.loadconf.get()
