"""The web file manager: WebDAV with a page for browsers (spec: bas-api §4, §16). Its script is /rtl/wfm/wfm.js."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from html import escape

from smqrt.http.dav.directory import Asked, DavDirectory
from smqrt.http.dav.names import href
from smqrt.http.dav.share import DavShare
from smqrt.http.forms import parse_parameters
from smqrt.http.headers import http_date
from smqrt.http.message import Request
from smqrt.http.resources import IoError, Stat
from smqrt.http.sessions import HttpSession
from smqrt.http.status import HttpError
from smqrt.loop.scheduling import Turn

Hook = Callable[[Request, str], object]

_BATCH = 64  # rows that are sent together
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_FIELDS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "private, no-store",
    "Referrer-Policy": "same-origin",  # a session URL is for nobody else
}
_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="/rtl/page.css">
<link rel="stylesheet" href="/rtl/wfm/wfm.css">
<script type="module" src="/rtl/wfm/wfm.js"></script>
</head>
<body>
<header>
<nav aria-label="Folders"><ol>{crumbs}</ol></nav>
<p class="links">{links}</p>
</header>
<main>
<div class="tools">
<button type="button" id="upload">Upload</button>
<button type="button" id="newfolder" class="second">New folder</button>
<input type="file" id="files" multiple hidden>
<p id="count" class="soft"></p>
</div>
<ul id="uploads" aria-live="polite"></ul>
<p id="message" role="alert" hidden></p>
<table>
<thead><tr><th scope="col">Name</th><th scope="col" class="size">Size</th><th scope="col" class="time">Changed</th><th scope="col"><span class="unseen">Actions</span></th></tr></thead>
<tbody id="entries">
"""  # noqa: E501
_UNITS = ("kB", "MB", "GB", "TB")
_UP = '<tr class="up"><td colspan="4"><a href="../">‹ Up</a></td></tr>\n'
_ROW = (
    '<tr data-name="{name}" data-kind="{kind}"><td><a href="{url}">{name}</a></td>'
    '<td class="size">{size}</td><td class="time"><time datetime="{iso}" title="{date}">{day}</time></td>'
    '<td class="actions">{actions}</td></tr>\n'
)
_ACTIONS = (
    '<button type="button" class="plain" data-do="rename">Rename</button>'
    '<button type="button" class="plain" data-do="delete">Delete</button>'
)
_DOWNLOAD = '<a class="plain" href="{url}" download>Download</a>'
_TAIL = """</tbody>
</table>
<p id="nothing" class="soft"{hidden}>Nothing here yet. Drop files on this page, or choose Upload.</p>
<p class="soft keys">Keys: ↑ ↓ choose, Enter opens, F2 renames, Del deletes, Backspace goes up, U uploads, N makes a folder.</p>
</main>
<div id="drop" hidden><p>Drop the files to upload them here</p></div>
<dialog id="ask" aria-labelledby="question"><form method="dialog"><h2 id="question"></h2><label><span class="unseen">Name</span><input id="answer" autocomplete="off" maxlength="255"></label><p class="buttons"><button type="button" value="" class="second" id="cancel">Cancel</button><button value="yes" id="yes">OK</button></p></form></dialog>
</body>
</html>
"""  # noqa: E501


class WfsDirectory(DavDirectory):
    """A directory that serves an io by WebDAV and with the web file manager. Args as `DavDirectory`.

    Attributes:
        session_s: how long a session lives unused that came by its URL; None leaves it as it is.
        helpuri, logouturi: where the page's links "Help" and "Log out" lead; empty for no link.
        filterservice: asked before each request with it and the path; True, it has answered.
        dircmd: the same, for requests with a parameter `cmd`.
    """

    session_s: int | None = None
    helpuri = ""
    logouturi = ""
    filterservice: Hook | None = None
    dircmd: Hook | None = None

    def _serve(self, asked: Asked) -> bool:
        request = asked.request
        path = asked.name + ("/" if asked.is_folder and asked.name else "")
        if self.filterservice is not None and self.filterservice(request, path):
            return True
        if self.dircmd is not None and _has_command(request) and self.dircmd(request, path):
            return True
        return super()._serve(asked)

    def _entered(self, session: HttpSession) -> None:
        if self.session_s is not None:
            session.max_inactive_s = self.session_s

    def _read_folder(self, asked: Asked, share: DavShare, stat: Stat) -> bool:
        response = asked.request.response
        if not asked.is_folder:
            response.redirect(asked.url)
            return True
        for field, value in _FIELDS.items():
            response.headers.set(field, value)
        if asked.request.method == "HEAD":
            response.end()
            return True
        try:
            found = share.list(asked.name)
        except IoError as error:
            raise HttpError(403 if error.word == "toomuchdata" else 500, error.word) from None
        turn = Turn()
        for piece in self._page(asked, found):
            response.write(piece.encode("utf-8", "replace"))
            turn.breathe()
        return True

    def _page(self, asked: Asked, found: list[tuple[str, Stat]]) -> Iterator[str]:
        parts = asked.name.split("/") if asked.name else []
        title = escape(parts[-1] if parts else self.name or "Files")
        yield _HEAD.format(title=title, crumbs=_crumbs(self.name or "Files", asked.base, parts), links=self._links())
        if parts:
            yield _UP
        for start in range(0, len(found), _BATCH):
            yield "".join([_row(stat) for _, stat in found[start : start + _BATCH]])
        yield _TAIL.format(hidden=" hidden" if found else "")

    def _links(self) -> str:
        both = (("Help", self.helpuri), ("Log out", self.logouturi))
        return " ".join(f'<a href="{escape(uri)}">{text}</a>' for text, uri in both if uri)


def _has_command(request: Request) -> bool:
    return any(name == b"cmd" for name, _ in parse_parameters(request.query.encode("ascii")))


def _crumbs(top: str, base: str, parts: list[str]) -> str:
    names = [top, *parts]
    urls = [href(base + "".join(f"{part}/" for part in parts[:count])) for count in range(len(names))]
    links = [f'<li><a href="{escape(url)}">{_shown(name)}</a></li>' for url, name in zip(urls, names, strict=True)]
    links[-1] = f'<li aria-current="page"><h1>{_shown(names[-1])}</h1></li>'
    return "".join(links)


def _row(stat: Stat) -> str:
    url = escape("./" + href(stat.name) + ("/" if stat.isdir else ""))
    when = datetime.fromtimestamp(stat.mtime, UTC)
    return _ROW.format(
        name=_shown(stat.name),
        kind="folder" if stat.isdir else "file",
        url=url,
        size="" if stat.isdir else _size(stat.size),
        iso=f"{when:%Y-%m-%dT%H:%M:%SZ}",
        date=http_date(stat.mtime),
        day=f"{when:%Y-%m-%d %H:%M}",
        actions=_ACTIONS if stat.isdir else _DOWNLOAD.format(url=url) + _ACTIONS,
    )


def _shown(name: str) -> str:
    return escape(name.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))


def _size(size_bytes: int) -> str:
    """A size for people."""
    if size_bytes < 1000:
        return f"{size_bytes} B"
    size, unit = size_bytes / 1000, 0
    while size >= 999.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.0f} {_UNITS[unit]}" if size >= 10 else f"{size:.1f} {_UNITS[unit]}"
