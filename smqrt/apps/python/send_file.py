"""Files as responses of functions."""

from __future__ import annotations

from urllib.parse import quote

from smqrt.errors import ArgumentError
from smqrt.http.headers import HttpError
from smqrt.http.message import Request
from smqrt.http.resources import Io
from smqrt.http.static_files import StaticFiles
from smqrt.process import current_application

_MAX_READERS = 8
"""Folders of an application whose small files are cached; an application that creates an io for each request gains
nothing from the cache."""


def send_file(request: Request, name: str, io: Io | None = None, download_as: str | None = None) -> None:
    """Send a file as the response, as the server sends static files: conditional requests, ranges, Content-Type.

    Args:
        request: the request to answer.
        name: name of the file in `io`; it can't lead out of the folder, and private and hidden files are not found.
        io: the folder, for example `smqrt.http.disk.DiskIo("/var/photos")`; by default the application's folder.
        download_as: the name under which the browser saves the file; None lets the browser display it.

    Raises:
        HttpError: 404, there is no such file.
        ArgumentError: no `io` outside of an application.
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
            raise ArgumentError("io: required outside of a Python application")
    kept = scope.kept if scope else {}
    files = kept.pop(io, None)
    if not isinstance(files, StaticFiles):
        files = StaticFiles(io)
    kept[io] = files
    if len(kept) > _MAX_READERS:
        del kept[next(iter(kept))]
    return files
