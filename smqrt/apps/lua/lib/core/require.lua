-- require as a Lua function, so that a module may block while it loads.
--
-- Search order: package.loaded, package.preload, the modules of the server, package.path, and the io objects of
-- the applications in the order in which they were added (spec: runtime §2.2).

local core = ...

local assert, concat, error, gsub, ipairs, load, loadfile = assert, table.concat, error, string.gsub, ipairs, load, loadfile
local pairs, rawtype, running, searchpath, setmetatable = pairs, core.rawtype, coroutine.running, package.searchpath, setmetatable

local MAX_WAIT_MS <const> = 10000 -- after which two activities probably wait for each other's module

local readers = {}

--- Add a source of modules: `reader(path)` returns source text and chunk name, or nil. `path` is the module name with "/" for ".".
function core.add_loader(reader)
  readers[#readers + 1] = reader
end

local function compiled(source, chunkname, name)
  local chunk, message = load(core.without_mark(source), chunkname, "t")
  if not chunk then error("error loading module '" .. name .. "':\n\t" .. message, 0) end
  return chunk
end

local function from_preload(name)
  local loader = package.preload[name]
  if loader then return loader, ":preload:" end
  return nil
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
  local file = searchpath(name, package.path)
  if not file then return nil end -- without its list of searched files: Lua's default locations do not help the reader
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
  return nil, "no file '.lua/" .. path .. ".lua' in an application that has called mako.createloader(io); appreq '" .. name ..
    "' loads modules of its own application without that call"
end

package.searchers = {from_preload, from_server, from_path, from_applications}

local function find_loader(name)
  local tried = {}
  for _, searcher in ipairs(package.searchers) do
    local loader, extra = searcher(name)
    if rawtype(loader) == "function" then return loader, extra end
    if extra then tried[#tried + 1] = "\n\t" .. extra end
  end
  core.raise("module '" .. name .. "' not found:" .. concat(tried))
end

local loading = {} -- name -> the coroutine that loads it, which may be blocked

local function wait_until_loaded(name)
  if loading[name] == running() then core.raise("loop: module '" .. name .. "' requires itself") end
  local last_ms = core.clock() + MAX_WAIT_MS
  while loading[name] and core.clock() < last_ms do core.sleep(1) end
  if loading[name] then core.raise("module '" .. name .. "' is still being loaded by another activity") end
end

--- Whether the running coroutine loads a module, which all applications share.
function core.in_shared_module()
  for _, co in pairs(loading) do
    if co == running() then return true end
  end
  return false
end

local Loading = {__close = function(entry) loading[entry.name] = nil end} -- also after an error, or when the activity is killed

local function load_module(name)
  local loaded = package.loaded
  local entry <close> = setmetatable({name = name}, Loading)
  loading[name] = running()
  local loader, extra = find_loader(name)
  local value = loader(name, extra)
  if value ~= nil then loaded[name] = value end
  if loaded[name] == nil then loaded[name] = true end
  return loaded[name], extra
end

--- As in Lua, but the module and the search for it may block. Waits for a module that another coroutine loads.
function require(name)
  name = core.arg.string(name, 1, "require")
  if loading[name] then wait_until_loaded(name) end
  local module = package.loaded[name]
  if module ~= nil then return module end
  return load_module(name)
end
