-- require "xml2table": a whole XML document as a table: {tag = "a", attr = {x = "1"}, "text", {tag = "b", attr = {}}}.
local core = ...

local xml2table = {}

-- syntax: xml2table.parse(text [, flags...]) -> document | nil, message      xml2table(text) is the same
function xml2table.parse(text, ...)
  local parser <close> = core.xparser.create(nil, nil, ...)
  local state, document = parser:parse(core.arg.string(text, 1, "parse"))
  if state == "DONE" then return document end
  return nil, document or "the document is not complete"
end

return setmetatable(xml2table, {__call = function(_, ...) return xml2table.parse(...) end})
