"""Certificates of a certificate authority that speaks ACME (RFC 8555): ordered and renewed by the server itself."""
