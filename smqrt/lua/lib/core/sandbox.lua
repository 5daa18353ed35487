-- Sandbox: what applications do not get, which is the way into lupa, hooks, machine code, binary chunks. They are trusted otherwise, as in the original.

local core = ...

local load, loadfile, select = load, loadfile, select

python, package.loaded.python = nil, nil
package.loadlib, package.cpath = nil, "" -- a string, as applications add to it; nothing is searched there
string.dump, os.exit = nil, nil
debug.sethook, debug.gethook, debug.getregistry, debug.debug = nil, nil, nil, nil

--- The text of a file without the mark of UTF-8 and without a first line that begins with "#", as Lua's loadfile has it.
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

-- Until lib/ba/apps.lua knows of applications.
function core.application() return nil end
function core.app_of() return nil end

ba = {} -- the namespace of the application server, filled by the parts in lib/ba
