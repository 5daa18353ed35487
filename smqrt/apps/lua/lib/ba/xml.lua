-- XML parser, which takes chunks and calls functions or builds a table of the document (spec: bas-api §13).
local core, py = ...

local concat, find, unpack = table.concat, string.find, string.unpack
local isyieldable, pairs, select, setmetatable = core.isyieldable, pairs, select, setmetatable

local SLICE <const> = py.slice()
local MAX_NODES <const> = 100000 -- elements and texts of a document as a table: about 25 MB
local EVENTS <const> = {S = "StartElement", E = "EndElement", T = "CharacterData", C = "Comment", P = "ProcessingInstruction"}
local FLAGS <const> = {namespaces = true, keepspace = true}

local parser = {}
local class = core.class("xparser", parser)

local function begin_document(self)
  self.handle = py.new(self.flags.namespaces == true)
  self.done, self.fault, self.too_large, self.document, self.nodes = false, nil, nil, nil, 0
  self.open, self.texts = {}, {}
end

local function release(self)
  if self.handle then py.collect(self.handle) end
  self.handle = nil
end

class.__gc, class.__close = release, release

-- ---- the table of a document

local function count_node(self)
  self.nodes = self.nodes + 1
  if self.nodes > MAX_NODES then self.too_large = "the document has more than " .. MAX_NODES .. " elements and texts" end
end

local function end_of_text(self)
  if #self.texts == 0 then return end
  local text, parent = concat(self.texts), self.open[#self.open]
  self.texts = {}
  if parent and (self.flags.keepspace or find(text, "%S")) then
    count_node(self)
    parent[#parent + 1] = text
  end
end

local build = {}

function build.StartElement(self, name, attributes)
  end_of_text(self)
  count_node(self)
  local element, parent = {tag = name, attr = attributes}, self.open[#self.open]
  if parent then parent[#parent + 1] = element else self.document = element end
  self.open[#self.open + 1] = element
end

function build.EndElement(self)
  end_of_text(self)
  self.open[#self.open] = nil
end

function build.CharacterData(self, text) self.texts[#self.texts + 1] = text end

-- ---- events

local function attributes_at(events, at)
  local attributes, amount, name = {}, nil, nil
  amount, at = unpack(">I4", events, at)
  for number = 1, amount do
    name, at = unpack(">s4", events, at)
    attributes[name], at = unpack(">s4", events, at)
    attributes[number] = name
  end
  return attributes, at
end

local function dispatch(self, events)
  local callbacks, context, handle = self.callbacks or build, self.callbacks and self.context or self, self.handle
  local at = 1
  while at <= #events and self.handle == handle and not self.too_large do -- a callback may reset or destroy it
    local kind, first, second
    kind, first, at = unpack(">c1s4", events, at)
    if kind == "S" then second, at = attributes_at(events, at) elseif kind == "P" then second, at = unpack(">s4", events, at) end
    local callback = callbacks[EVENTS[kind]]
    if callback then callback(context, first, second) end
  end
end

local function feed(self, chunk)
  for at = 1, #chunk, SLICE do
    if at > 1 and isyieldable() then core.pause() end
    local handle = self.handle
    local events, done = py.feed(handle, chunk:sub(at, at + SLICE - 1))
    if not events then return nil, done end
    dispatch(self, events)
    if self.too_large then return nil, self.too_large end
    if self.handle ~= handle then return true end
    self.done = done
  end
  if not self.done then return true end
  return "DONE", self.callbacks and self.context or self.document
end

local ParseGuard = {__close = function(self) self.parser.busy = false end}

-- syntax: parser:parse(chunk) -> true (more is needed) | "DONE", document or context | nil, message with line and column
-- An error in a callback ends the parsing and is raised.
function parser:parse(chunk)
  chunk = core.arg.string(chunk, 1, "parse")
  if not self.handle then core.raise("the parser was destroyed") end
  if self.busy then core.raise("parse: a callback can't call it") end
  if self.fault then return nil, self.fault end
  local guard <close> = setmetatable({parser = self}, ParseGuard)
  self.busy, self.fault = true, "a callback failed before" -- remains when feed raises
  local state, result = feed(self, chunk)
  self.fault = not state and result or nil
  return state, result
end

-- Begins a new document with the same callbacks.
function parser:reset()
  release(self)
  begin_document(self)
  return true
end

function parser:destroy()
  local was_there = self.handle ~= nil
  release(self)
  return was_there
end

local xparser = {}

-- syntax: xparser.create([callbacks [, context [, "namespaces"] [, "keepspace"]]]) -> parser
-- callbacks: functions StartElement(context, name, attributes), EndElement(context, name), CharacterData(context, text),
-- Comment(context, text), ProcessingInstruction(context, target, data). Without callbacks the parser builds a table.
function xparser.create(callbacks, context, ...)
  core.arg.optional(core.arg.table, callbacks, nil, 1, "create")
  for _, name in pairs(EVENTS) do
    if callbacks then core.arg.optional(core.arg["function"], callbacks[name], nil, name, "create") end
  end
  local flags = {}
  for at = 1, select("#", ...) do
    local flag = core.arg.string(select(at, ...), at + 2, "create")
    if not FLAGS[flag] then core.raise("unknown flag '" .. flag .. "' ('namespaces' or 'keepspace' expected)") end
    flags[flag] = true
  end
  local self = setmetatable({callbacks = callbacks, context = context, flags = flags}, class)
  begin_document(self)
  return self
end

core.xparser = xparser
