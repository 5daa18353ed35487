"""File servers: WebDAV (RFC 4918) and the web file manager over an io (spec: bas-api §4, §17)."""
