-- The XML parser for require (spec: bas-api §13).
local core = ...

return core.xparser
