-- The Python half of the core.
local core, py = ...

core.module_source = py.module_source

--- Logs an error that has nowhere else to go, for a callback that a library runs protected.
core.log_error = py.log_error

--- Milliseconds that never go back, and a wait of so many.
core.clock, core.sleep = py.clock, py.sleep

--- Lets others run; not for places that can't be left (`core.isyieldable`).
core.pause = py.pause
