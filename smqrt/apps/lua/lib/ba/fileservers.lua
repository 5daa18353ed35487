-- File servers: WebDAV, and the web file manager, which includes it (spec: bas-api §4). require "wfs" adds ba.create.wfs.
local core, py = ...

local ipairs, pairs, setmetatable, tostring = ipairs, pairs, setmetatable, tostring

local arg, dirs = core.arg, core.dir
local dav, locks = {}, {}
local dav_class, locks_class = dirs.derive("dav", dav), core.class("lockmgr", locks)

local function make(maker, manager, name, priority, source, lockdir, maxuploads, maxlocks)
  local handle = py.create(
    name, dirs.check_priority(priority, maker), core.io.check(source, 3, maker), manager,
    arg.optional(arg.plain, lockdir, nil, 4, maker),
    arg.optional(arg.positive, maxuploads, nil, 5, maker), arg.optional(arg.positive, maxlocks, nil, 6, maker))
  return dirs.wrap(handle, dav_class)
end

-- syntax: ba.create.dav([name] [, priority], io [, lockdir [, maxuploads=5 [, maxlocks=20]]]) -> dav
function ba.create.dav(...)
  return make("dav", false, dirs.name_and_priority("dav", ...))
end

-- syntax: dav:lockmgr() -> lockmgr | nil      nil without a lockdir
function dav:lockmgr()
  if py.locks(self.handle) then return setmetatable({handle = self.handle, owner = self}, locks_class) end
end

-- syntax: lockmgr:locks() -> {{path, owner, shared, deep, seconds}, …}
function locks:locks()
  local all, rows = {}, {py.locks(self.handle)}
  for at = 2, #rows, 5 do
    all[#all + 1] = {path = rows[at], owner = rows[at + 1], shared = rows[at + 2], deep = rows[at + 3], seconds = rows[at + 4]}
  end
  return all
end

-- syntax: lockmgr:islocked(path) -> boolean      lockmgr:unlock(path) -> whether there was a lock
function locks:islocked(path) return py.is_locked(self.handle, arg.string(path, 1, "islocked")) end

function locks:unlock(path) return py.unlock(self.handle, arg.string(path, 1, "unlock")) end

-- The web file manager: a table whose `dir` is the directory. It also has the methods of directories.
local wfs = {}
local wfs_class = {__index = wfs, __name = "wfs"}

for name, method in pairs(dirs.methods) do
  wfs[name] = function(self, ...) return method(self.dir, ...) end
end

setmetatable(wfs, { -- for methods that other files add to directories later
  __index = function(_, name)
    local method = dirs.methods[name] or dav[name]
    if method then return function(self, ...) return method(self.dir, ...) end end
  end,
})

local TEXTS <const>, HOOKS <const> = {"helpuri", "logouturi"}, {"filterservice", "dircmd"}

-- Makes a directory function of f. Only true ends the search, so that a filter without a result lets the search continue.
local function hook(f)
  return function(...) return f(...) == true end
end

-- syntax: wfs:configure{tmo, helpuri, logouturi, filterservice, dircmd}
-- tmo: lifetime in seconds of a session that was given in the URL. filterservice(_ENV, relpath): true when it has responded.
-- dircmd(_ENV, relpath): called for requests with a parameter `cmd`; true when it has responded.
function wfs:configure(options)
  arg.table(options, 1, "configure")
  local handle = self.dir.handle
  local tmo = arg.optional(arg.positive, options.tmo, nil, "tmo", "configure")
  for _, name in ipairs(TEXTS) do arg.optional(arg.string, options[name], nil, name, "configure") end
  for _, name in ipairs(HOOKS) do arg.optional(arg["function"], options[name], nil, name, "configure") end
  if tmo then py.set_timeout(handle, tmo) end
  for _, name in ipairs(TEXTS) do
    if options[name] ~= nil then py.set_text(handle, name, tostring(options[name])) end
  end
  for _, name in ipairs(HOOKS) do
    if options[name] then
      local inner = ba.create.dir()
      inner.func = hook(options[name])
      self.dir.hooks[name] = inner -- not collected before the directory
      py.set_hook(handle, name, inner.handle)
    end
  end
  return true
end

function core.create_wfs(...)
  local directory = make("wfs", true, dirs.name_and_priority("wfs", ...))
  directory.hooks = {}
  return setmetatable({dir = directory}, wfs_class)
end
