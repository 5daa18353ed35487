"""The page at `/` of a server with several applications: a list of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from html import escape
from urllib.parse import quote

from smqrt.http.message import Request
from smqrt.http.tree import Directory

LAST = -127  # after every application

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Applications</title>
<link rel="icon" href="data:,">
<style>
  :root {{ color-scheme: light dark }}
  body {{ font: 1.05rem/1.5 system-ui, sans-serif; max-width: 34rem; margin: 12vh auto; padding: 0 1.2rem }}
  h1 {{ font-size: 1.4rem; font-weight: 600 }}
  ul {{ list-style: none; padding: 0 }}
  li {{ margin: .5rem 0 }}
  a, li > span {{ display: block; padding: .7rem 1rem; border: 1px solid #8885; border-radius: .6rem }}
  a {{ color: inherit; text-decoration: none }}
  a:hover, a:focus-visible {{ border-color: #28c; color: #28c }}
  .failed {{ color: #c33 }}
</style>
<h1>Applications</h1>
<ul>
{items}
</ul>
</html>
"""

Entry = tuple[str, bool]  # name, whether it runs


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
        items = "\n".join(_item(name, runs) for name, runs in self._entries())
        response = request.response
        response.headers.set("Content-Type", "text/html; charset=utf-8")
        response.headers.set("Cache-Control", "no-store")
        response.write(_PAGE.format(items=items or "<li>There is none.</li>").encode())
        return True


def _item(name: str, runs: bool) -> str:
    if not runs:
        return f'<li><span class="failed">{escape(name)}: failed, see the server\'s output</span></li>'
    return f'<li><a href="/{quote(name)}/">{escape(name)}</a></li>'
