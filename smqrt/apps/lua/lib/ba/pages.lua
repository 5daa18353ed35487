-- Lua Server Pages, compiled (spec: bas-api §1). A reader's `pages` holds what belongs to each of its pages.
local core, py = ...

local load = load

-- Called when a page is new or changed. Its `page` table stays. -> true | nil, error
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

-- syntax: ba.parselsp(text [, raw]) -> Lua source | nil, error      raw: without the prologue of five arguments
function ba.parselsp(text, raw)
  return py.parse(core.arg.string(text, 1, "parselsp"), core.arg.optional(core.arg.boolean, raw, false, 2, "parselsp"))
end

py.attach(core.ref(compile))
