-- Uploads: the body of a request is written to a file while the application continues (spec: bas-api §4, §17).
local core, py = ...

local arg, exchange = core.arg, core.exchange
local getmetatable, setmetatable, xpcall = getmetatable, setmetatable, xpcall

local MAX_UPLOADS <const> = 10 -- of one uploader at once; a browser sends six

local up = {}
local class = core.class("upload", up)
local uploads = {} -- number -> {up =, environment =, started =, done =, failed =}

-- Adds a method that returns a property of the upload. The object keeps the last value after the upload.
local function add_property(name)
  up[name] = function(self)
    if uploads[self.handle] ~= nil then self["last_" .. name] = py[name == "multipart" and "is_multipart" or name](self.handle) end
    return self["last_" .. name]
  end
end
add_property"name" add_property"url" add_property"multipart"

-- syntax: up:session() -> session | nil
function up:session()
  local number = py.session(self.handle)
  return number and core.session.wrap(number)
end

-- syntax: up:response() -> deferred response      always the same object
function up:response()
  if not self.deferred then
    py.respond(self.handle)
    self.deferred = core.deferred_response(self.handle)
  end
  return self.deferred
end

local function call_back(number, name, ...)
  local upload = uploads[number]
  up.name(upload.up)
  local done, message = xpcall(upload[name], core.traceback, upload.environment, upload.up, ...)
  if done then return true end
  core.log_error("upload: " .. message)
  core.report_error(message, upload.environment)
  return false
end

-- Ends an upload. A response that the application has dropped is complete: the garbage collector closes it.
local function forget(number)
  local response = uploads[number].up.deferred
  uploads[number] = nil
  local is_open = response and response:valid()
  response = nil
  if is_open then
    core.collect()
    core.collect() -- the first may have been in progress already
  end
end

py.attach(core.ref(call_back), core.ref(forget))

-- Returns the environment of the callbacks; a table of the application also gets the globals.
local function environment_of(given)
  if given == nil then return setmetatable({}, {__index = _G}) end
  arg.table(given, 6, "uploader")
  if getmetatable(given) == nil then setmetatable(given, {__index = _G}) end
  return given
end

-- syntax: ba.create.upload(io [, maxuploads]) -> uploader
--         uploader(request, name, startcb, donecb, errcb [, env [, cont]])      ends the page, unless cont is true
function ba.create.upload(io, max_uploads)
  core.io.check(io, 1, "upload")
  max_uploads = arg.optional(arg.positive, max_uploads, MAX_UPLOADS, 2, "upload")
  local uploader = py.new_uploader()
  return function(request, name, started, done, failed, environment, continues)
    arg.instance(request, exchange.class, 1, "uploader")
    name = arg.string(name, 2, "uploader")
    arg["function"](started, 3, "uploader")
    arg["function"](done, 4, "uploader")
    arg["function"](failed, 5, "uploader")
    environment = environment_of(environment)
    local handle = exchange.handle_of(request)
    if not py.take(uploader, max_uploads, handle, io.handle, name) then exchange.stop(request) end
    local object = setmetatable({handle = handle}, class)
    uploads[handle] = {up = object, environment = environment, started = started, done = done, failed = failed}
    up.name(object) up.url(object) up.multipart(object)
    request.take()
    exchange.seal(request, nil)
    if continues ~= true then exchange.stop(request) end
    return true
  end
end
