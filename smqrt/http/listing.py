"""The page at `/` of a server with several applications: what each is, and the way to the manual."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from html import escape
from typing import NamedTuple
from urllib.parse import quote

from smqrt.http.message import Request
from smqrt.http.tree import Directory

LAST = -127  # after every application

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Applications</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="/rtl/page.css">
<link rel="stylesheet" href="/rtl/manual.css">
</head>
<body>
<header><h1>Applications</h1><p><a href="/help/">Manual</a></p></header>
<main>
<p class="soft">{count} on this server.</p>
<ul class="applications">
{items}
</ul>
</main>
</body>
</html>
"""


class Entry(NamedTuple):
    """An application in the list.

    Attributes:
        name: the path segment it is mounted under.
        about: what it is, one sentence; may be empty.
        error: why it does not run, None when it does.
    """

    name: str
    about: str
    error: str | None


class Listing(Directory):
    """Answers `/` when no application does.

    Args:
        entries: asked at every request for the applications to list.
    """

    def __init__(self, entries: Callable[[], Iterable[Entry]]) -> None:
        super().__init__(None, LAST)
        self._entries = entries

    def service(self, request: Request, relpath: str) -> bool:
        """See `Directory.service`."""
        if relpath:
            return False
        shows_errors = request.access.shows_errors(request)
        items = [_item(entry, shows_errors) for entry in self._entries()]
        count = f"{len(items)} application{'s' if len(items) != 1 else ''}"
        response = request.response
        response.headers.set("Content-Type", "text/html; charset=utf-8")
        response.headers.set("Cache-Control", "no-store")
        response.write(_PAGE.format(count=count, items="\n".join(items)).encode("utf-8", "backslashreplace"))
        return True


def _item(entry: Entry, shows_errors: bool) -> str:
    name, about = escape(entry.name), f'<p class="soft">{escape(entry.about)}</p>' if entry.about else ""
    if entry.error is None:
        return f'<li class="card"><h2><a href="/{quote(entry.name)}/">{name}</a></h2>{about}</li>'
    failure = f"<pre>{escape(entry.error)}</pre>" if shows_errors else "<p>The server's log says why.</p>"
    return f'<li class="card"><h2>{name} <span class="failed">failed</span></h2>{about}{failure}</li>'
