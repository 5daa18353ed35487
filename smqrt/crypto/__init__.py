"""Ciphers, keys, signatures, tokens, certificate requests and the key file, on `cryptography` and PyJWT."""
