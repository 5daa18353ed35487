-- require as a Lua function, so that a module may block while it loads.
--
-- Searched in this order: package.loaded, package.preload, the modules shipped with the server, package.path, and the io objects of
-- the applications in the order they were added (spec: runtime §2.2).

local core = ...

local assert, concat, error, gsub, ipairs, load, loadfile = assert, table.concat, error, string.gsub, ipairs, load, loadfile
local rawtype, searchpath = core.rawtype, package.searchpath

local readers = {}

--- Adds a place to look for modules: `reader(path)` answers the source and its chunk name, or nil. `path` is the name with "/" for ".".
function core.add_loader(reader)
  readers[#readers + 1] = reader
end

local function compiled(source, chunkname, name)
  local chunk, message = load(source, chunkname, "t")
  if not chunk then error("error loading module '" .. name .. "':\n\t" .. message, 0) end
  return chunk
end

local function from_preload(name)
  local loader = package.preload[name]
  if loader then return loader, ":preload:" end
  return nil, "no field package.preload['" .. name .. "']"
end

local function from_server(name)
  local module = core.modules[name]
  if module ~= nil then return function() return module end, ":server:" end
  local source, chunkname = core.module_source(name)
  if not source then return nil, "no module '" .. name .. "' in the server" end
  local chunk = compiled(source, chunkname, name)
  return function() return chunk(core) end, chunkname
end

local function from_path(name)
  local file, message = searchpath(name, package.path)
  if not file then return nil, message end
  local chunk, fault = loadfile(file, "t")
  if not chunk then error("error loading module '" .. name .. "':\n\t" .. fault, 0) end
  return chunk, file
end

local function from_applications(name)
  local path = gsub(name, "%.", "/")
  for _, reader in ipairs(readers) do
    local source, chunkname = reader(path)
    if source then return compiled(source, chunkname, name), chunkname end
  end
  return nil, "no module '" .. name .. "' in an application"
end

package.searchers = {from_preload, from_server, from_path, from_applications}

local function find_loader(name)
  local tried = {}
  for _, searcher in ipairs(package.searchers) do
    local loader, extra = searcher(name)
    if rawtype(loader) == "function" then return loader, extra end
    tried[#tried + 1] = "\n\t" .. (extra or "")
  end
  core.raise("module '" .. name .. "' not found:" .. concat(tried))
end

function require(name)
  local loaded = package.loaded
  core.arg.string(name, 1, "require")
  if loaded[name] ~= nil then return loaded[name] end
  local loader, extra = find_loader(name)
  local value = loader(name, extra)
  if value ~= nil then loaded[name] = value end
  if loaded[name] == nil then loaded[name] = true end
  return loaded[name], extra
end
