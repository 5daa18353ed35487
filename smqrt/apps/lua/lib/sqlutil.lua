-- require "sqlutil": databases of the server's data folder, and short ways to their rows (spec: bas-api §11, §17).
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
local made = {} -- folders that were made, or were there

-- syntax: sqlutil.dir([path]) -> the folder of the databases, with a "/" at its end; made when it is not there
-- With a path that is the folder from now on, for all applications.
function sqlutil.dir(path)
  if path ~= nil then folder = with_slash(arg.string(path, 1, "dir")) end
  folder = folder or with_slash(base_folder()) .. "data/"
  if not made[folder] then
    local done, fault = sql_part.make_folder(folder)
    if not done then raise("sqlutil.dir: " .. folder .. ": " .. fault) end
    made[folder] = true
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

-- syntax: sqlutil.open([env,] name [, options]) -> env, conn       raises what fails
function sqlutil.open(env, name, options)
  if core.rawtype(env) == "string" or core.rawtype(env) == "number" then env, name, options = nil, env, name end
  env = env or luasql.sqlite()
  local path = file_of(name, 1, "open")
  local conn, code, text = env:connect(path, options)
  if not conn then raise("sqlutil.open: " .. path .. ": " .. code .. ": " .. text) end
  return env, conn
end

-- syntax: sqlutil.close(env, conn) -> true        each may be nil or closed already
function sqlutil.close(env, conn)
  if conn then conn:close() end
  if env then env:close() end
  return true
end

local Opened = {__close = function(opened)
  if opened.cursor then opened.cursor:close() end
  if opened.is_mine then sqlutil.close(opened.env, opened.conn) end
end}

--- A connection, and the objects to close with it: none that the application has opened itself.
local function connected(source, fname)
  if sql_part.is_connection(source) then return setmetatable({conn = source}, Opened) end
  arg["function"](source, 1, fname)
  local env, conn = source()
  if sql_part.is_connection(env) then env, conn = nil, env end
  if not sql_part.is_connection(conn) then raise("bad argument #1 to '" .. fname .. "' (it opens no connection)") end
  return setmetatable({env = env, conn = conn, is_mine = true}, Opened)
end

--- "a, b FROM t" is short for "SELECT a, b FROM t"; a whole statement is accepted too.
local function query(sql, fname)
  sql = arg.string(sql, 2, fname)
  local word = sql:match"^%s*(%a+)[%s%*%(\"'`%[]"
  word = word and word:upper()
  if word == "SELECT" or word == "WITH" or word == "PRAGMA" or word == "VALUES" or word == "EXPLAIN" then return sql end
  return "SELECT " .. sql
end

local function asked(source, sql, fname)
  local opened = connected(source, fname)
  local cursor, code, text = opened.conn:execute(query(sql, fname))
  if core.type(cursor) == "userdata" then opened.cursor = cursor end
  return opened, code, text
end

-- syntax: sqlutil.select(conn | openf, "columns FROM ...", f) -> what f(cursor) returns | nil, code, text
-- openf: a function that returns env, conn as sqlutil.open does; both are closed afterwards.
function sqlutil.select(source, sql, f)
  arg["function"](f, 3, "select")
  local opened <close>, code, text = asked(source, sql, "select")
  if not opened.cursor then return nil, code, text end
  return f(opened.cursor)
end

-- syntax: sqlutil.find(conn | openf, sql) -> the values of the first row | nil when there is none | nil, code, text
function sqlutil.find(source, sql)
  local opened <close>, code, text = asked(source, sql, "find")
  if not opened.cursor then return nil, code, text end
  return opened.cursor:fetch()
end

-- syntax: sqlutil.findt(conn | openf, sql [, table]) -> the first row by the names of its columns | nil | nil, code, text
function sqlutil.findt(source, sql, row)
  row = arg.optional(arg.table, row, {}, 3, "findt")
  local opened <close>, code, text = asked(source, sql, "findt")
  if not opened.cursor then return nil, code, text end
  return opened.cursor:fetch(row, "a")
end

-- syntax: for a, b in sqlutil.iter(conn | openf, sql) do ... end         for row in sqlutil.iter(conn | openf, sql, true) do ... end
-- Raises what fails. A loop that is left early closes the cursor too. A row whose first value is NULL ends the first form; the second
-- returns tables by the names of the columns.
function sqlutil.iter(source, sql, as_table)
  local opened, code, text = asked(source, sql, "iter")
  if not opened.cursor then
    local _ <close> = opened
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
