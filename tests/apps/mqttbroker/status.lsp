<?lsp
-- What the brokers say of themselves, and what they reported, as JSON.
local answer = {errors = app.errors}
for name, broker in pairs(app.brokers) do answer[name] = broker:status() end
response:json(answer)
?>
