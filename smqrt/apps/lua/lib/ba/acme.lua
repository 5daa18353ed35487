-- Functions for lib/acme/engine.lua (spec: bas-api §17.1).
local core, py = ...

core.acme = py
