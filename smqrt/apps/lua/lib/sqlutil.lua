-- require "sqlutil": databases in the server's data folder, and queries in one call (spec: bas-api §11, §17).
local core = ...

local arg, error, pcall, raise, require, setmetatable = core.arg, error, pcall, core.raise, require, setmetatable
local sql_part = core.sql

local sqlutil = {}

local function base_folder()
  local found, conf = pcall(require, "loadconf")
  if found and core.type(conf) == "table" and core.rawtype(conf.dbdir) == "string" then return conf.dbdir end
  if mako and mako.cfgfname then return mako.cfgdir end
  local home = ba.openio and ba.openio"home"
  return home and home:realpath"" or "."
end

local function with_slash(path)
  return path:sub(-1) == "/" and path or path .. "/"
end

local folder
local existing = {} -- set of folders that exist

-- syntax: sqlutil.dir([path]) -> the folder of the databases, with a "/" at its end; it is created if necessary
-- path: the new folder, for all applications.
function sqlutil.dir(path)
  if path ~= nil then folder = with_slash(arg.string(path, 1, "dir")) end
  folder = folder or with_slash(base_folder()) .. "data/"
  if not existing[folder] then
    local done, fault = sql_part.make_folder(folder)
    if not done then raise("sqlutil.dir: " .. folder .. ": " .. fault) end
    existing[folder] = true
  end
  return folder
end

local function file_of(name, index, fname)
  name = arg.string(name, index, fname)
  if name == "" or ("/" .. name .. "/"):find("/../", 1, true) then
    raise("bad argument #" .. index .. " to '" .. fname .. "' (a name without '..' expected, got '" .. name .. "')")
  end
  return sqlutil.dir() .. name .. ".sqlite.db"
end

-- syntax: sqlutil.exist(name) -> whether there is a database of this name
function sqlutil.exist(name)
  return sql_part.exists(file_of(name, 1, "exist"))
end

-- syntax: sqlutil.open([env,] name [, options]) -> env, conn       raises an error when it fails
function sqlutil.open(env, name, options)
  if core.rawtype(env) == "string" or core.rawtype(env) == "number" then env, name, options = nil, env, name end
  env = env or luasql.sqlite()
  local path = file_of(name, 1, "open")
  local conn, code, text = env:connect(path, options)
  if not conn then raise("sqlutil.open: " .. path .. ": " .. code .. ": " .. text) end
  return env, conn
end

-- syntax: sqlutil.close(env, conn) -> true        each may be nil or closed
function sqlutil.close(env, conn)
  if conn then conn:close() end
  if env then env:close() end
  return true
end

local Opened = {__close = function(opened)
  if opened.cursor then opened.cursor:close() end
  if opened.is_mine then sqlutil.close(opened.env, opened.conn) end
end}

-- A connection and the objects to close with it. A connection of the application is not closed.
local function connected(source, fname)
  if sql_part.is_connection(source) then return setmetatable({conn = source}, Opened) end
  arg["function"](source, 1, fname)
  local env, conn = source()
  if sql_part.is_connection(env) then env, conn = nil, env end
  if not sql_part.is_connection(conn) then raise("bad argument #1 to '" .. fname .. "' (the function did not return a connection)") end
  return setmetatable({env = env, conn = conn, is_mine = true}, Opened)
end

-- The whole statement: "a, b FROM t" is short for "SELECT a, b FROM t".
local function query(sql, fname)
  sql = arg.string(sql, 2, fname)
  local word = sql:match"^%s*(%a+)[%s%*%(\"'`%[]"
  word = word and word:upper()
  if word == "SELECT" or word == "WITH" or word == "PRAGMA" or word == "VALUES" or word == "EXPLAIN" then return sql end
  return "SELECT " .. sql
end

local function run_query(source, sql, fname)
  local opened = connected(source, fname)
  local cursor, code, text = opened.conn:execute(query(sql, fname))
  if core.type(cursor) == "userdata" then opened.cursor = cursor end
  return opened, code, text
end

-- syntax: sqlutil.select(conn | openf, "columns FROM ...", f) -> results of f(cursor) | nil, code, text
-- openf: a function that returns env, conn as sqlutil.open does; both are closed afterwards.
function sqlutil.select(source, sql, f)
  arg["function"](f, 3, "select")
  local opened <close>, code, text = run_query(source, sql, "select")
  if not opened.cursor then return nil, code, text end
  return f(opened.cursor)
end

-- syntax: sqlutil.find(conn | openf, sql) -> the values of the first row | nil when there is none | nil, code, text
function sqlutil.find(source, sql)
  local opened <close>, code, text = run_query(source, sql, "find")
  if not opened.cursor then return nil, code, text end
  return opened.cursor:fetch()
end

-- syntax: sqlutil.findt(conn | openf, sql [, table]) -> the first row by column name | nil when there is none | nil, code, text
function sqlutil.findt(source, sql, row)
  row = arg.optional(arg.table, row, {}, 3, "findt")
  local opened <close>, code, text = run_query(source, sql, "findt")
  if not opened.cursor then return nil, code, text end
  return opened.cursor:fetch(row, "a")
end

-- syntax: for a, b in sqlutil.iter(conn | openf, sql) do ... end         for row in sqlutil.iter(conn | openf, sql, true) do ... end
-- Raises an error when it fails. Leaving the loop early also closes the cursor. The first form ends at a row whose first value is NULL;
-- the second returns tables by column name.
function sqlutil.iter(source, sql, as_table)
  local opened, code, text = run_query(source, sql, "iter")
  if not opened.cursor then
    local _ <close> = opened -- closes a connection that was opened here
    raise("sqlutil.iter: " .. code .. ": " .. text)
  end
  local function pass(first, ...)
    if first == nil then
      if ... ~= nil then raise("sqlutil.iter: " .. (...)) end
      Opened.__close(opened)
    end
    return first, ...
  end
  local function step()
    if opened.cursor.closed then return nil end
    if as_table then return pass(opened.cursor:fetch({}, "a")) end
    return pass(opened.cursor:fetch())
  end
  return step, nil, nil, opened
end

return sqlutil
