<?lsp
local query = request:data()
local http <close> = app.fetcher(math.tointeger(tonumber(query.proxyport)))
local ok, err, details = http:request{url = query.url}
local status, fault = ok and http:status()
if not status then
  response:setstatus(502)
  print(err or fault, details or "")
  return
end
response:setstatus(status)
response:setcontenttype(http:header"content-type" or "application/octet-stream")
for data in function() return http:read() end do response:write(data) end
?>
