-- The global `luasql`: SQLite with the interface of LuaSQL (spec: bas-api §11, §17). Statements run in threads; calls block only the caller.
--
-- Failed calls return nil, a code such as "BUSY", and SQLite's text. Calls of closed objects raise errors.
local core, py = ...

local arg, pairs, raise, rawtype, select, setmetatable = core.arg, pairs, core.raise, core.rawtype, select, setmetatable
local next, tonumber, tostring = next, tonumber, tostring
local byte, find, rep, unpack, unpack_table, upper = string.byte, string.find, string.rep, string.unpack, table.unpack, string.upper

local environment, connection, statement, cursor = {}, {}, {}, {}
local env_class, conn_class = core.class("SQLite environment", environment), core.class("SQLite connection", connection)
local stmt_class, cur_class = core.class("SQLite statement", statement), core.class("SQLite cursor", cursor)

local function check_open(self, class, what, fname)
  arg.instance(self, class, 0, fname)
  if self.closed then raise("the " .. what .. " is closed ('" .. fname .. "')") end
  return self
end

-- ---- packed rows, see put_row in sqlite.py

local PLAIN_ROW <const>, NULL <const> = 1, 0

local formats = setmetatable({}, {__index = function(known, columns) -- number of columns -> format of a row without NULLs
  known[columns] = "<" .. rep("s4", columns)
  return known[columns]
end})

local function row_with_nulls(packed, at, columns)
  local row = {}
  for column = 1, columns do
    local kind = byte(packed, at)
    at = at + 1
    if kind ~= NULL then row[column], at = unpack("<s4", packed, at) end
  end
  return row, at
end

local function row_at(packed, at, columns)
  if byte(packed, at) ~= PLAIN_ROW then return row_with_nulls(packed, at + 1, columns) end
  local row = {unpack(formats[columns], packed, at + 1)}
  local next_at = row[columns + 1]
  row[columns + 1] = nil
  return row, next_at
end

-- The values of rows of one column.
local function list_of(packed)
  local list, at, row = {}, 1, nil
  while at <= #packed do
    row, at = row_at(packed, at, 1)
    list[#list + 1] = row[1]
  end
  return list
end

local function new_cursor(conn, number, columns, packed, sql)
  local names, at = row_at(packed, 1, columns)
  return setmetatable({
    conn = conn, number = number, columns = columns, names = names, packed = packed, at = at, sql = sql,
  }, cur_class)
end

-- The next row as an array; nil at the end; nil, code, text after an error.
local function next_row(self)
  while self.at > #self.packed do
    if self.number == 0 then return nil end
    local packed, number, text = py.fetch(self.conn.handle, self.number)
    if not packed then
      self.number = 0
      return nil, number, text
    end
    self.packed, self.number, self.at = packed, number, 1
  end
  local row
  row, self.at = row_at(self.packed, self.at, self.columns)
  return row
end

local function fill(target, row, names, mode)
  local by_name = mode == "a" or find(mode, "a", 1, true)
  if by_name then
    for column = 1, #names do target[names[column]] = row[column] end
  end
  if not by_name or mode ~= "a" and find(mode, "n", 1, true) then
    for column = 1, #names do target[column] = row[column] end
  end
  return target
end

-- syntax: cursor:fetch() -> values of the next row | nil at the end | nil, code, text
--         cursor:fetch(table [, "n" | "a"]) -> table     by column number (the default) or by column name; "an": both
function cursor:fetch(target, mode)
  check_open(self, cur_class, "cursor", "fetch")
  if rawtype(target) == "string" then target, mode = {}, target end
  if target ~= nil then arg.table(target, 1, "fetch") end
  mode = arg.optional(arg.string, mode, "n", 2, "fetch")
  local row, code, text = next_row(self)
  if not row then
    if code then return nil, code, text end
    return nil
  end
  if target then return fill(target, row, self.names, mode) end
  return unpack_table(row, 1, self.columns)
end

-- syntax: cursor:getcolnames() -> array
function cursor:getcolnames()
  check_open(self, cur_class, "cursor", "getcolnames")
  return {unpack_table(self.names)}
end

-- syntax: cursor:getcoltypes() -> array      the declared types; "" for expressions
function cursor:getcoltypes()
  check_open(self, cur_class, "cursor", "getcoltypes")
  local packed, code, text = py.column_types(self.conn.handle, self.sql)
  if not packed then return nil, code, text end
  local types = list_of(packed)
  for column = #types + 1, self.columns do types[column] = "" end
  return types
end

local function close_cursor(self)
  if self.closed then return false end
  self.closed = true
  if self.number ~= 0 then py.drop_cursor(self.conn.handle, self.number) end
  self.number, self.packed = 0, ""
  return true
end

-- syntax: cursor:close() -> true | false when it was closed before
function cursor:close()
  return close_cursor(arg.instance(self, cur_class, 0, "close"))
end

cur_class.__close, cur_class.__gc = close_cursor, close_cursor

-- ---- connections

local KINDS <const> = {DEFERRED = true, IMMEDIATE = true, EXCLUSIVE = true}

local function kind_of(value, index, fname)
  if value == nil then return "DEFERRED" end
  local kind = upper(arg.string(value, index, fname))
  if not KINDS[kind] then
    raise("bad argument #" .. index .. " to '" .. fname .. "' (DEFERRED, IMMEDIATE or EXCLUSIVE expected, got '" .. value .. "')")
  end
  return kind
end

local function check_connection(self, fname)
  return check_open(self, conn_class, "connection", fname)
end

local function executed(self, sql, parameters)
  local first, columns, packed = py.execute(self.handle, sql, parameters)
  if first == nil then return nil, columns, packed end
  if not columns then return first end
  return new_cursor(self, first, columns, packed, sql)
end

-- syntax: conn:execute(sql) -> cursor when the statement has columns, else the number of changed rows | nil, code, text
-- Runs only the first statement of the text; mexec runs all.
function connection:execute(sql)
  check_connection(self, "execute")
  return executed(self, arg.string(sql, 1, "execute"))
end

-- syntax: conn:mexec(sql) -> true | nil, code, text        runs all statements of the text, until one fails
function connection:mexec(sql)
  check_connection(self, "mexec")
  return py.execute_all(self.handle, arg.string(sql, 1, "mexec"))
end

-- syntax: conn:commit([kind]), conn:rollback([kind]) -> true | nil, code, text
-- In manual mode the next transaction begins at once. kind: DEFERRED, IMMEDIATE or EXCLUSIVE.
for _, name in ipairs{"commit", "rollback"} do
  connection[name] = function(self, kind)
    check_connection(self, name)
    return py["end"](self.handle, upper(name), kind_of(kind, 1, name))
  end
end

-- syntax: conn:setautocommit(true) -> true                 rolls back, and leaves manual mode
--         conn:setautocommit(false [, kind]) -> true | nil, code, text      begins a transaction; the arguments may be swapped
function connection:setautocommit(auto, kind)
  check_connection(self, "setautocommit")
  if auto == true then return py.manual(self.handle, false, "DEFERRED") end
  if rawtype(auto) == "string" then auto, kind = kind, auto end
  return py.manual(self.handle, true, kind_of(kind, 2, "setautocommit"))
end

-- syntax: conn:setbusytimeout(ms) -> true      maximum wait of a statement for the lock of another connection (default 1000)
function connection:setbusytimeout(ms)
  check_connection(self, "setbusytimeout")
  return py.set_busy_timeout(self.handle, arg.milliseconds(ms, 1, "setbusytimeout"))
end

-- syntax: conn:lastid() -> the rowid of the last row that this connection inserted
function connection:lastid()
  return py.last_id(check_connection(self, "lastid").handle)
end

-- syntax: conn:tables() -> array of names
function connection:tables()
  local packed, code, text = py.tables(check_connection(self, "tables").handle)
  if not packed then return nil, code, text end
  return list_of(packed)
end

-- syntax: conn:close() -> true | false when it was closed before      closes its cursors and rolls back its transaction
function connection:close()
  arg.instance(self, conn_class, 0, "close")
  if self.closed then return false end
  self.closed = true
  self.env.open = self.env.open - 1
  if core.isyieldable() then return py.close(self.handle) end
  py.drop(self.handle) -- does not block: called for a `<close>` variable of killed code, or by the garbage collector
  return true
end

conn_class.__close, conn_class.__gc = connection.close, connection.close

-- ---- statements with parameters

local TYPES <const> = {TEXT = true, BLOB = true, INTEGER = true, FLOAT = true, REAL = true, NULL = true, ZEROBLOB = true}

local function typed(pair, index)
  local kind, value = pair[1], pair[2]
  kind = rawtype(kind) == "string" and upper(kind)
  if not TYPES[kind] then core.bad_argument(index, "bind", "{TYPE, value}", kind or pair[1]) end
  if kind == "NULL" or value == nil then return nil end
  if kind == "TEXT" then return arg.string(value, index, "bind") end
  if kind == "BLOB" then return {blob = arg.string(value, index, "bind")} end
  if kind == "ZEROBLOB" then return {blob = ("\0"):rep(arg.size(value, index, "bind"))} end
  local number = tonumber(value)
  if not number then core.bad_argument(index, "bind", "number", value) end
  if kind == "INTEGER" then return arg.integer(number, index, "bind") end
  return number + 0.0
end

local PLAIN <const> = {string = true, number = true, boolean = true, ["nil"] = true}

local function bound(value, index)
  if core.type(value) == "table" then return typed(value, index) end
  if core.is_bytearray(value) then return {blob = tostring(value)} end
  if not PLAIN[rawtype(value)] then core.bad_argument(index, "bind", "string, number, boolean or nil", value) end
  if rawtype(value) == "boolean" then return value and 1 or 0 end
  return value
end

local function bind_names(self, values)
  local plain = {}
  for name, value in pairs(values) do
    plain[arg.string(name, 1, "bind"):gsub("^[:@$]", "")] = bound(value, name)
  end
  self.parameters = core.table_codec.dump{values = plain}
end

local function bind_list(self, values, count)
  local plain = {}
  for at = 1, count do plain[at] = bound(values[at], at) end
  self.parameters = core.table_codec.dump{count = count, values = plain}
end

-- syntax: conn:prepare(sql) -> statement | nil, code, text
function connection:prepare(sql)
  check_connection(self, "prepare")
  local count, code, text = py.prepare(self.handle, arg.string(sql, 1, "prepare"))
  if not count then return nil, code, text end
  return setmetatable({conn = self, sql = sql, count = count}, stmt_class)
end

local function check_statement(self, fname)
  return check_open(self, stmt_class, "statement", fname)
end

-- syntax: stmt:bind(value, ...) -> true      stmt:bind{value, ...}      stmt:bind{name = value}
-- A value is a string, number, boolean, nil, or {TYPE, value} with one of TEXT, BLOB, INTEGER, FLOAT, NULL, ZEROBLOB.
function statement:bind(first, ...)
  check_statement(self, "bind")
  local is_list = core.type(first) == "table" and select("#", ...) == 0 and not (self.count == 1 and TYPES[first[1]])
  if not is_list then
    bind_list(self, {first, ...}, self.count)
  elseif rawtype(next(first)) == "string" then
    bind_names(self, first)
  else
    bind_list(self, first, self.count)
  end
  return true
end

-- syntax: stmt:execute([arguments of bind]) -> as conn:execute
function statement:execute(...)
  check_statement(self, "execute")
  check_connection(self.conn, "execute")
  if select("#", ...) > 0 then self:bind(...) end
  if not self.parameters and self.count > 0 then bind_list(self, {}, self.count) end
  return executed(self.conn, self.sql, self.parameters)
end

-- syntax: stmt:close() -> true | false when it was closed before
function statement:close()
  arg.instance(self, stmt_class, 0, "close")
  if self.closed then return false end
  self.closed = true
  return true
end

stmt_class.__close = statement.close

-- ---- environments

local MODES <const> = {READONLY = "ro", READWRITE = "rw", CREATE = ""}

local function mode_of(options)
  if options == nil then return "" end
  if rawtype(options) == "string" then return MODES[upper(options)] or "" end
  arg.table(options, 2, "connect")
  return options.readonly and "ro" or options.create == false and "rw" or ""
end

local function connect(path, mode)
  return py.connect(path, mode, core.application())
end

local LIMIT_REACHED <const> = "LIMIT"

-- syntax: env:connect(path [, {readonly=false, create=true, busytimeout=1000}]) -> conn | nil, code, text
function environment:connect(path, options)
  check_open(self, env_class, "environment", "connect")
  path = arg.string(path, 1, "connect")
  local mode = mode_of(options)
  local handle, code, text = connect(path, mode)
  if code == LIMIT_REACHED then -- unreachable connections count until they are collected
    core.collect()
    core.collect() -- the first call may have finished a cycle that had already marked them
    handle, code, text = connect(path, mode)
  end
  if not handle then return nil, code == LIMIT_REACHED and "CANTOPEN" or code, text end
  self.open = self.open + 1
  local conn = setmetatable({handle = handle, env = self}, conn_class)
  if rawtype(options) == "table" and options.busytimeout then conn:setbusytimeout(options.busytimeout) end
  return conn
end

-- syntax: env:close() -> true | false when it was closed before, or has open connections
function environment:close()
  arg.instance(self, env_class, 0, "close")
  if self.closed or self.open > 0 then return false end
  self.closed = true
  return true
end

env_class.__close = environment.close

-- syntax: env:version() -> the version of SQLite
function environment.version() return py.version() end

-- syntax: env.quotestr(text) -> an SQL literal       called with a dot or a colon
local function quotestr(text, second)
  if core.getmetatable(text) == env_class then text = second end
  return py.quote(arg.string(text, 1, "quotestr"))
end

environment.quotestr = quotestr

luasql = {quotestr = quotestr}

-- syntax: luasql.sqlite() -> env
function luasql.sqlite()
  return setmetatable({open = 0}, env_class)
end

core.sql = {make_folder = py.make_folder, exists = py.exists}

--- Whether `value` is a connection.
function core.sql.is_connection(value)
  return rawtype(value) == "table" and core.getmetatable(value) == conn_class
end

return luasql
