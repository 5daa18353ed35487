-- require "xparser": the XML parser (spec: bas-api §13).
local core = ...

return core.xparser
