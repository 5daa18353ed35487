-- Sparkplug B for require: encode and decode payloads (spec: bas-api 12).
local core = ...

return core.require_sparkplug()
