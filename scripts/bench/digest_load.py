"""Requests with the credentials of Digest for wrk, which can't make them itself: made before, each used once."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from hashlib import sha256
from pathlib import Path

PRELOAD = """
local users = ba.create.jsonuser()
users:set{ann = {pwd = "secret"}}
local closed = ba.create.resrdr("closed", 1, io)
closed:setauth(ba.create.authenticator(users))
dir:insertprolog(closed, true)
"""
"""For an application's `.preload`: its files below /closed/, for `ann` with the password `secret`."""

_SCRIPT = """
local requests, at = {}, 0
function init()
  for line in io.lines(%r) do requests[#requests + 1] = wrk.format("GET", nil, {Authorization = line}) end
end
function request()
  at = at %% #requests + 1
  return requests[at]
end
"""


def write(folder: Path, url: str, count: int) -> Path:
    """Writes a script for wrk that sends `count` requests for `url`, and returns its path."""
    try:
        urllib.request.urlopen(url)
    except urllib.error.HTTPError as error:
        fields = error.headers.get_all("WWW-Authenticate") or []
    challenge = next(field for field in fields if "SHA-256" in field)
    found = re.search(r'realm="([^"]*)".*nonce="([^"]*)"', challenge)
    assert found, challenge
    realm, nonce = found.groups()
    path = "/" + url.split("/", 3)[3]
    ha1, ha2 = _hash(f"ann:{realm}:secret"), _hash(f"GET:{path}")
    lines = folder / "authorizations"
    with lines.open("w") as file:
        for at in range(1, count + 1):
            answer = _hash(f"{ha1}:{nonce}:{at:08x}:c:auth:{ha2}")
            file.write(
                f'Digest username="ann", realm="{realm}", nonce="{nonce}", uri="{path}", algorithm=SHA-256, '
                f'cnonce="c", nc={at:08x}, qop=auth, response="{answer}"\n'
            )
    script = folder / "digest.lua"
    script.write_text(_SCRIPT % str(lines))
    return script


def _hash(text: str) -> str:
    return sha256(text.encode()).hexdigest()
