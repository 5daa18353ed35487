-- A plugin of the Lua language server: in pages (.lsp) it shows the server only the Lua code.

---@class diff
---@field start integer
---@field finish integer
---@field text string

--- Returns the replacements that turn a page into Lua: text becomes spaces, `<?lsp= x ?>` becomes `_emit( x )`.
---@param uri string
---@param text string
---@return diff[]?
function OnSetText(uri, text)
  if not uri:find "%.lsp$" then return nil end
  local diffs, at = {}, 1
  local function replace(first, last, with)
    if first <= last then diffs[#diffs + 1] = {start = first, finish = last, text = with} end
  end
  local function blank(first, last)
    replace(first, last, (text:sub(first, last):gsub("[^\r\n]", " ")))
  end
  while true do
    local first, last, equals = text:find("<%?lsp(=?)", at)
    if not first then break end
    blank(at, first - 1)
    replace(first, last, equals == "=" and "_emit(" or "     ")
    local close, close_last = text:find("?>", last + 1, true)
    if not close then return diffs end
    replace(close, close_last, equals == "=" and ");" or "; ")
    at = close_last + 1
  end
  blank(at, #text)
  return diffs
end
