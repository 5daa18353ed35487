"""Ciphers, keys, signatures, tokens, certificate requests and the key file, based on `cryptography` and PyJWT."""
