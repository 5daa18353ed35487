-- What lib/acme/engine.lua calls (spec: bas-api §17.1).
local core, py = ...

core.acme = py
