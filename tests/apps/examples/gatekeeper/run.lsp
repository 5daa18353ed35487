<?lsp
-- Runs a command and shows what it said, errors apart.
local name = app.whois(request)
local done, out, errs, status = false, {}, {}, nil
local pty, err, why = ba.forkpty({async = function(pty)
  while true do
    local text, is_error = pty:read()
    if not text then break end
    local lines = is_error and errs or out
    lines[#lines + 1] = text
  end
  status = pty:close(true)
  done = true
end, env = {WHO = name}}, "sh", "-c", request:data "command")
if not pty then response:json{error = err, why = why} end
while not done do ba.sleep(5) end
local ok = pcall(function() response:json{out = table.concat(out), errors = table.concat(errs), status = status} end)
error "never reached: json has ended the page"
?>
