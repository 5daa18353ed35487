<?lsp
-- The device's certificate signing request, by a key that never leaves it.
if not ba.tpm.haskey "gate" then ba.tpm.createkey "gate" end
local csr = ba.tpm.createcsr("gate", {commonname = "gate", organization = "Ours"}, {"SSL_SERVER"}, {"DIGITAL_SIGNATURE"}, "gate.local")
response:setcontenttype "application/x-pem-file"
response:send(csr)
?>
