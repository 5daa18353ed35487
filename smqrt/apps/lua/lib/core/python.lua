-- Python functions of the core.
local core, py = ...

core.module_source = py.module_source

--- Log an error that cannot be raised, such as one of a callback.
core.log_error = py.log_error

--- clock: monotonic time in milliseconds. sleep: wait for a number of milliseconds.
core.clock, core.sleep = py.clock, py.sleep

--- Let other activities run. Only where `core.isyieldable` is true.
core.pause = py.pause
