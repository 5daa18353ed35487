-- Restrictions of applications: no lupa, debug hooks, C libraries or binary chunks. Applications are trusted otherwise.

local core = ...

local format, load, loadfile, select = string.format, load, loadfile, select

python, package.loaded.python = nil, nil
package.loadlib, package.cpath = nil, "" -- cpath is a string because applications append to it; it is never searched
string.dump, os.exit = nil, nil
debug.sethook, debug.gethook, debug.getregistry, debug.debug = nil, nil, nil, nil

local CATEGORIES <const> = {all = true, collate = true, ctype = true, monetary = true, numeric = true, time = true}
local SETTABLE <const> = {[""] = true, C = true, POSIX = true}

--- As in Lua on a system whose only locale is "C". The locale of a process is shared: another one would change the decimal point
-- in the JSON of all applications.
function os.setlocale(locale, category)
  if locale ~= nil then locale = core.arg.string(locale, 1, "setlocale") end
  category = category == nil and "all" or core.arg.string(category, 2, "setlocale")
  if not CATEGORIES[category] then core.raise(format("bad argument #2 to 'setlocale' (invalid option '%s')", category)) end
  if locale == nil or SETTABLE[locale] then return "C" end
  return nil
end

--- The text of a file without a byte order mark and without a first line that begins with "#", as in Lua's loadfile.
function core.without_mark(text)
  return (text:gsub("^\xEF\xBB\xBF", ""):gsub("^#[^\n]*", ""))
end

local function text_only(mode)
  if mode == nil or mode == "bt" or mode == "t" then return "t" end
  return nil, "attempt to load a chunk (only text can be loaded, mode is '" .. tostring(mode) .. "')"
end

--- As in Lua, for source text only.
function _G.load(chunk, name, mode, ...)
  local text, message = text_only(mode)
  if not text then return nil, message end
  if select("#", ...) == 0 then return load(chunk, name, text) end
  return load(chunk, name, text, (...))
end

--- As in Lua, for source text only.
function _G.loadfile(name, mode, ...)
  local text, message = text_only(mode)
  if not text then return nil, message end
  if select("#", ...) == 0 then return loadfile(name, text) end
  return loadfile(name, text, (...))
end

--- As in Lua; the chunk may block.
function dofile(name)
  local chunk, message = loadfile(name, "t")
  if not chunk then error(message, 0) end
  return chunk()
end

-- Replaced by lib/ba/apps.lua.
function core.application() return nil end
function core.app_of() return nil end

ba = {} -- the namespace of the application server, filled by the files in lib/ba
