"""The login page of authenticators that have none of their own."""

from __future__ import annotations

from html import escape
from typing import Protocol


class PageInfo(Protocol):
    """What the page tells, see `smqrt.http.logins.authenticator.AuthInfo`."""

    realm: str
    denied: bool
    seed: str | None
    seedkey: str | None
    username: str | None

    @property
    def why(self) -> str: ...


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Sign in · {realm}</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="/rtl/page.css">
<link rel="stylesheet" href="/rtl/login.css">
{scripts}</head>
<body>
<main>
<form method="post" class="card">
<div><h1>Sign in</h1><p class="soft">{realm}</p></div>
<div><label for="ba_username">Name</label>
<input id="ba_username" name="ba_username" required autocomplete="username" autocapitalize="none" autofocus></div>
<div><label for="ba_password">Password</label>
<input id="ba_password" name="ba_password" type="password" required autocomplete="current-password"></div>
<p role="alert">{refusal}</p>
{fields}<button id="ba_loginbut">Sign in</button>
</form>
</main>
</body>
</html>
"""
_SCRIPTS = """<script src="/rtl/sha1.js" defer></script>
<script src="/rtl/spark-md5.min.js" defer></script>
"""
_FIELDS = """<input type="hidden" name="ba_realm" value="{realm}">
<input type="hidden" name="ba_seed" value="{seed}">
<input type="hidden" name="ba_seedkey" value="{seedkey}">
"""


def login_page(info: PageInfo, hashes: bool) -> bytes:
    """Build the page.

    Args:
        info: what it tells.
        hashes: whether it hashes the password; a user database that has to see the password can't look at a hash.
    """
    refusal = escape(info.why) or ("The name or the password is wrong." if info.username is not None else "")
    if info.denied:
        refusal = "Too many attempts. Try again in a while."
    realm = escape(info.realm)
    fields = _FIELDS.format(realm=realm, seed=info.seed, seedkey=info.seedkey) if hashes else ""
    page = _PAGE.format(realm=realm, refusal=refusal, scripts=_SCRIPTS if hashes else "", fields=fields)
    return page.encode("utf-8", "backslashreplace")
