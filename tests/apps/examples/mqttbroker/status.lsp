<?lsp
-- Status of the brokers, and their reports, as JSON.
local answer = {errors = app.errors}
for name, broker in pairs(app.brokers) do answer[name] = broker:status() end
response:json(answer)
?>
