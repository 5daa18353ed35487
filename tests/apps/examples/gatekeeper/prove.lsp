<?lsp
-- The key's owner signs data and a digest of the challenge, as in Web Authentication.
local data = request:data()
local key = app.users[data.name]
if not key then response:senderror(404) return end
local signed = ba.b64decode(data.data) .. ba.crypto.hash "sha256" (ba.b64decode(data.challenge)) (true)
local digest = ba.crypto.hash "sha256" (signed) (true)
response:json{valid = ba.crypto.verify(digest, ba.b64decode(data.signature), key)}
?>
