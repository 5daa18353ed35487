"""Files as answers of functions."""

from __future__ import annotations

from urllib.parse import quote

from smqrt.errors import ArgumentError
from smqrt.http.headers import HttpError
from smqrt.http.message import Request
from smqrt.http.resources import Io
from smqrt.http.static_files import StaticFiles
from smqrt.process import current_application

_MAX_READERS = 8
"""So many of an application's folders keep their small files in memory; one that makes an io for every request has
none of it."""


def send_file(request: Request, name: str, io: Io | None = None, download_as: str | None = None) -> None:
    """Answer with a file, as the server does with those it finds by itself: with conditions, ranges, its Content-Type.

    Args:
        request: the request to answer.
        name: of the file in `io`; it can't lead out of it, and private and hidden files are not found.
        io: where the file is, `smqrt.http.disk.DiskIo("/var/photos")` for example; the application's folder if not
            given.
        download_as: the name under which the browser saves it; without, the browser shows it where it can.

    Raises:
        HttpError: 404, there is no such file.
        ArgumentError: no `io`, and no application runs.
    """
    files = _files(io)
    entry = files.find(name)
    if entry is None or entry.is_page:
        raise HttpError(404)
    fields = {}
    if download_as is not None:
        fields["Content-Disposition"] = f"attachment; filename*=UTF-8''{quote(download_as, safe='')}"
    files.serve(request, entry, fields)


def _files(io: Io | None) -> StaticFiles:
    scope = current_application.current_app.get()
    if io is None:
        io = scope.names.get("io") if scope else None  # type: ignore[assignment]
        if io is None:
            raise ArgumentError("io: give one, no application in Python runs here")
    kept = scope.kept if scope else {}
    files = kept.pop(io, None)
    if not isinstance(files, StaticFiles):
        files = StaticFiles(io)
    kept[io] = files
    if len(kept) > _MAX_READERS:
        del kept[next(iter(kept))]
    return files
