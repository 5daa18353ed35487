-- The Python half of the core.
local core, py = ...

core.module_source = py.module_source
