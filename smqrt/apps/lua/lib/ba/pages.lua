-- Compiled Lua Server Pages (spec: bas-api §1). `pages` of a reader: path -> {chunk, memory, io, app}.
local core, py = ...

local load = load

-- Compiles a page that is new or was changed; it keeps `memory`, its `page` table. -> true | nil, error
local function compile(directory, pathname, source)
  local reader = core.dir.handles[directory]
  local chunk, message = load(source, "@" .. pathname, "t")
  if not chunk then return nil, message end
  local page = reader.pages[pathname]
  if not page then
    page = {memory = {}, io = reader:io(), app = reader.app}
    reader.pages[pathname] = page
  end
  page.chunk = chunk
  return true
end

-- syntax: ba.parselsp(text [, raw]) -> Lua source | nil, error      raw: without the first line, which names the five arguments
function ba.parselsp(text, raw)
  return py.parse(core.arg.string(text, 1, "parselsp"), core.arg.optional(core.arg.boolean, raw, false, 2, "parselsp"))
end

py.attach(core.ref(compile))
