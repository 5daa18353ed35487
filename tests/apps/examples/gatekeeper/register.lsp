<?lsp
-- A security key introduces itself: a map in CBOR with the public key (COSE) as bytes.
local body = ""
for chunk in request:rawrdr() do body = body .. chunk end
local credential, position, kind, err = app.cbor.pdecode(body)
if not credential then
  response:setstatus(400)
  response:json{error = err}
end
local cose = app.cbor.decode(credential.key)
if cose[1] ~= 2 or cose[3] ~= -7 then response:senderror(415, "Only ES256") return end
app.users[credential.name] = {x = cose[-2], y = cose[-3]}
response:json{registered = credential.name, bits = 8 * ba.crypto.keysize(app.users[credential.name])}
?>
