"""File servers: WebDAV (RFC 4918) and the web file manager over an io (spec: bas-api §4, §17).

from smqrt.app import dir, io
from smqrt.http.dav import WfsDirectory

dir.insert(WfsDirectory("fs", io=io.sub("shared"), lockdir=".LOCK"))
"""

from smqrt.http.dav.directory import DavDirectory, WfsDirectory

__all__ = ["DavDirectory", "WfsDirectory"]
