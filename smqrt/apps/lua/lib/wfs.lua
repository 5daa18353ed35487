-- require "wfs": the web file manager and its WebDAV server (spec: bas-api §4).
local core = ...

ba.create.wfs = core.create_wfs

return ba.create.wfs
