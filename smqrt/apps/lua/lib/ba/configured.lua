-- Users, the file server, the trace logger and the options of applications in mako.conf (spec: runtime §1.2).
local core = ...

local error, ipairs, pairs, require, tostring, type, xpcall = error, ipairs, pairs, require, tostring, core.type, xpcall

local configured = {}
core.configured = configured

local MAX_LOGINS <const> = 20 -- of one user at the same time; a further login ends the oldest

local kept = {} -- the server's own directories: the tree drops those whose objects are collected
local users -- {db =, authenticator =}, nil without users in mako.conf

local function invalid(setting, rule, value)
  error(setting .. " must be " .. rule .. ", not " .. tostring(value), 0)
end

local function checked(value, kind, setting, rule)
  if value ~= nil and type(value) ~= kind then invalid(setting, rule, value) end
  return value
end

local function set_up_users(conf)
  checked(conf.users, "table", "users", "a table of names and passwords")
  if conf.users == nil then return end
  local entries, count = {}, 0
  for name, password in pairs(conf.users) do
    if type(password) ~= "string" and type(password) ~= "table" then
      invalid("users." .. tostring(name), "a password, or a table with its HA1", password)
    end
    entries[name] = {pwd = password, roles = {}, maxusers = MAX_LOGINS, recycle = true}
    count = count + 1
  end
  local db = ba.create.jsonuser()
  local done, message = db:set(entries)
  if not done then error("users: " .. tostring(message), 0) end
  local options = {type = "digest", realm = checked(conf.realm, "string", "realm", "a string")}
  users = {db = db, authenticator = ba.create.authenticator(db, options)}
  function mako.udb() return db, count end -- defined only with users
end

local function need_users(setting)
  if not users then error(setting .. " needs users in mako.conf: without a login any client could write", 0) end
  return users.authenticator
end

local function set_up_file_server(conf)
  local op = checked(conf.fileserver, "table", "fileserver", "a table")
  if op == nil then return end
  require "wfs"
  local base = ba.openio(op.ioname or "disk")
  if not base then invalid("fileserver.ioname", "the name of an io", op.ioname) end
  local io, message = base, nil
  if op.path then io, message = ba.mkio(base, op.path) end
  if not io then error("fileserver.path: " .. tostring(op.path) .. ": " .. tostring(message), 0) end
  local fs = ba.create.wfs(op.fsname or "fs", op.priority or 0, io, op.lockdir)
  if not op.noauth then fs:setauth(need_users("fileserver")) end
  fs:insert()
  mako.fs, kept.fs = fs, fs
end

local function set_up_trace_logger(conf, is_wanted)
  local op = conf.tracelogger or is_wanted
  if not op then return end
  if conf.users ~= nil and not users then error("tracelogger: its login needs the users of mako.conf, and these are invalid", 0) end
  local tracelogger = ba.create.tracelogger()
  if type(op) == "table" then tracelogger:configure(op) end
  if users then tracelogger:setauth(users.authenticator) end
  mako.rtldir:insert(tracelogger, true)
  mako.tldir, kept.tracelogger = tracelogger, tracelogger
end

-- Sets up each part. A failure is logged, and the other parts are still set up.
function configured.server(tracelogger)
  local conf = core.loadconf.get()
  for _, set_up in ipairs{set_up_users, set_up_file_server, set_up_trace_logger} do
    local done, message = xpcall(set_up, core.describe, conf, tracelogger)
    if not done then core.log_error("mako.conf: " .. message) end
  end
end

--- Applies `apps[entry]` to an application before its .preload. Raises when that fails: the application must
-- not be served without its login.
function configured.application(entry, app)
  local apps = core.loadconf.get().apps
  local op = type(apps) == "table" and (apps.path and apps or apps[entry])
  if type(op) ~= "table" then return end
  local setting = "apps[" .. entry .. "]"
  app.conf = op.conf
  if op.auth then app.dir:setauth(need_users(setting .. ".auth")) end
  if op.dav then
    local lockdir = app.io:resourcetype() == "disk" and ".LOCK" or nil
    local dav = ba.create.dav(op.dav == true and "dav" or op.dav, 127, app.io, lockdir)
    dav:setauth(need_users(setting .. ".dav"))
    app.dir:insertprolog(dav, true)
  end
end
