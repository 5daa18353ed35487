"""Certificate orders and renewals by ACME (RFC 8555)."""
