"""WebDAV methods and lock rules of WsgiDAV over a `DavShare`.

Listings, downloads and the Destination field are implemented here: WsgiDAV builds listings in memory, and its parser of
Destination cuts names at "?" or ";". Paths inside WsgiDAV are `escaped`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO
from typing import Any, TypeVar
from urllib.parse import quote
from xml.etree import ElementTree

from wsgidav.dav_error import DAVError
from wsgidav.dav_provider import DAVCollection, DAVNonCollection, DAVProvider
from wsgidav.lock_man.lock_manager import LockManager
from wsgidav.request_server import RequestServer

import smqrt.http.dav.properties as listing
from smqrt.http.dav.properties import DeadProperties
from smqrt.http.dav.share import DavShare, destination, escaped, href, unescaped
from smqrt.http.headers import HttpError, parse_date
from smqrt.http.open_files import NewFile
from smqrt.http.resources import IoError, Stat
from smqrt.http.static_files import etag
from smqrt.http.wsgi import Environ

logging.getLogger("wsgidav").setLevel(logging.CRITICAL + 1)  # it logs errors of clients with tracebacks

T = TypeVar("T")
Start = Callable[..., Any]

BLOCK_BYTES = 1 << 20
"""Bytes of an upload that are written at once."""
MAX_FIELD_CHARACTERS = 2048  # of If, Timeout and others: WsgiDAV parses these in 15 ms, and in quadratic time
_STATUSES = {
    "notfound": 404,
    "noaccess": 403,
    "exist": 405,
    "notempty": 409,
    "invalidname": 400,
    "nospace": 507,
    "toomuchdata": 403,
    "noimplementation": 403,
    "locked": 423,
}
_XML_METHODS = frozenset(("PROPFIND", "PROPPATCH", "LOCK"))
_LIMITED_FIELDS = tuple(
    f"HTTP_{field}" for field in ("IF", "TIMEOUT", "DEPTH", "OVERWRITE", "LOCK_TOKEN", "IF_MATCH", "IF_NONE_MATCH")
)
_CONFIG: dict[str, Any] = {"block_size": BLOCK_BYTES, "hotfixes": {}, "mutable_live_props": []}
_WIN32 = "{urn:schemas-microsoft-com:}"


class Engine:
    """The WebDAV methods of one file server.

    Args:
        locks: the lock manager; None rejects LOCK.
        properties: properties that clients set; None rejects setting them.
    """

    def __init__(self, locks: LockManager | None, properties: DeadProperties | None) -> None:
        self._locks, self._properties = locks, properties

    def __call__(
        self, share: DavShare, bases: tuple[str, ...], user: str, environ: Environ, start: Start
    ) -> Iterable[bytes]:
        """Respond to one request as a WSGI application does.

        Args:
            share: the files that the client may see.
            bases: the paths of the share, each with "/" at its end; the first is that of this request.
            user: name of the user, empty without a login.

        Raises:
            HttpError, DAVError: the error to respond with.
        """
        provider = _Provider(share, bases, self._locks, self._properties)
        _prepare(environ, bases)
        environ |= {
            "wsgidav.config": _CONFIG,
            "wsgidav.verbose": 0,
            "wsgidav.provider": provider,
            "wsgidav.app": provider,
            "wsgidav.auth.user_name": user,
            "PATH_INFO": escaped(environ["smqrt.path"]),
        }
        without_page = _WithoutPage(start, environ["REQUEST_METHOD"])
        try:
            for piece in _Methods(provider)(environ, without_page.start):
                if not without_page.empty:
                    yield piece
            if without_page.empty:
                yield b""
        finally:
            upload: NewFile | None = environ.get("smqrt.upload")
            if upload is not None:
                upload.abort()


class _Provider(DAVProvider):  # type: ignore[misc]
    """A `DavShare` as a provider of WsgiDAV, for one request."""

    def __init__(
        self, share: DavShare, bases: tuple[str, ...], locks: LockManager | None, properties: DeadProperties | None
    ) -> None:
        super().__init__()
        self.share, self.bases, self.properties, self.verbose = share, bases, properties, 0
        self.set_share_path("")
        self.set_mount_path(escaped(bases[0].removesuffix("/")))
        self.set_lock_manager(locks)

    def resolve_provider(self, path: str) -> tuple[str, _Provider]:
        """See the method of WsgiDAV's applications. This object is the only provider."""
        return "", self

    def get_resource_inst(self, path: str | None, environ: Environ) -> _Folder | _File | None:
        """See the base class. `path` is None outside of the share."""
        if path is None:
            return None
        name = unescaped(path).strip("/")
        stat = _with_dav_errors(lambda: self.share.stat(name))
        if stat is None or (path.endswith("/") and name and not stat.isdir):
            return None
        return (_Folder if stat.isdir else _File)(name, environ, stat)

    def forget_properties(self, name: str) -> None:
        """Remove the properties of a file or folder that was removed."""
        if self.properties is not None:
            self.properties.forget(name)

    def locks_of(self, name: str, isdir: bool = False) -> list[dict[str, Any]]:
        """Return the locks that protect a name, with the paths of the locked files and folders."""
        url = _lock_key(name, isdir)
        found = self.lock_manager.get_indirect_url_lock_list(url) if self.lock_manager else []
        return [
            {**lock, "href": href(self.bases[0] + unescaped(unescaped(lock["root"])).lstrip("/"))} for lock in found
        ]


class _Resource:
    """Base class of files and folders. It precedes WsgiDAV's class in the method resolution order."""

    provider: _Provider
    environ: Environ
    is_collection: bool

    def __init__(self, name: str, environ: Environ, stat: Stat | None) -> None:
        super().__init__(escaped("/" + name), environ)  # type: ignore[call-arg]
        self.share, self.own_name, self.stat = environ["wsgidav.provider"].share, name, stat

    def get_href(self) -> str:
        """Return the path for the client."""
        return href(self.provider.bases[0] + self.own_name + ("/" if self.is_collection and self.own_name else ""))

    def get_display_name(self) -> str:
        """Return the last part of the name."""
        return self.own_name.rpartition("/")[2]

    def get_last_modified(self) -> float | None:
        """Return the time of the last change in seconds since 1970."""
        return self.stat.mtime if self.stat else None

    def get_property_value(self, name: str) -> Any:
        """Return the lockdiscovery property. Only LOCK calls this, for its new lock."""
        if name != "{DAV:}lockdiscovery":
            raise DAVError(404)
        text = listing.lock_discovery(self.provider.locks_of(self.own_name, self.is_collection))
        return ElementTree.fromstring(text.replace("<D:lockdiscovery>", '<D:lockdiscovery xmlns:D="DAV:">', 1))

    def set_property_value(self, name: str, value: Any, *, dry_run: bool = False) -> bool:
        """Set a property. Properties of Windows are ignored."""
        properties = self.provider.properties
        if name.startswith(_WIN32):
            return True  # Windows sets them after an upload, and reports a rejection as a failure of the upload
        if name.startswith("{DAV:}") or properties is None:
            raise DAVError(403, "this file server has no folder for properties")
        text = None if value is None else ElementTree.tostring(value, "unicode")
        if text is not None and not properties.has_room(self.own_name, name, text):
            raise DAVError(507, "too many properties, or a property is too long")
        if not dry_run:
            properties.set(self.own_name, name, text)
        return True

    def handle_delete(self) -> bool:
        """Delete the file or folder, unless a lock on it or on a file inside forbids this."""
        manager = self.provider.lock_manager
        if manager is not None:
            tokens, user = self.environ["wsgidav.ifLockTokenList"], self.environ["wsgidav.user_name"]
            url = _lock_key(self.own_name, self.is_collection)
            manager.check_write_permission(url=url, depth="infinity", token_list=tokens, principal=user)
        if self.is_collection:
            _with_dav_errors(lambda: self.share.remove_tree(self.own_name))
        else:
            _with_dav_errors(lambda: self.share.remove(self.own_name, False))
        self.provider.forget_properties(self.own_name)
        self._release_locks()
        return True

    def handle_move(self, path: str) -> bool:
        """Move the file or folder by renaming it."""
        target = self._prepare_target(path)
        if self.is_collection and _with_dav_errors(lambda: self.share.has_invisible(self.own_name)):
            raise DAVError(403, "the folder contains private files")
        _with_dav_errors(lambda: self.share.rename(self.own_name, target))
        if self.provider.properties is not None:
            self.provider.properties.move(self.own_name, target)
        self._release_locks()
        return True

    def handle_copy(self, path: str, *, depth_infinity: bool) -> bool:
        """Copy the file or folder, with its content if `depth_infinity`."""
        target = self._prepare_target(path)
        if self.provider.properties is not None:
            self.provider.properties.copy(self.own_name, target, depth_infinity)
        if not self.is_collection:
            _with_dav_errors(lambda: self.share.copy(self.own_name, target))
            return True
        inside = _with_dav_errors(lambda: list(self.share.walk(self.own_name))) if depth_infinity else []
        _with_dav_errors(lambda: self.share.mkdir(target))
        for name, stat in inside:
            new = target + name[len(self.own_name) :]
            _with_dav_errors(lambda new=new: self.share.mkdir(new) if stat.isdir else self.share.copy(name, new))  # type: ignore[misc] # noqa: B023
        return True

    def _prepare_target(self, path: str) -> str:
        """Return the name of a destination. Removes an existing folder there, or a file that a folder replaces."""
        target = unescaped(path).strip("/")
        if not target or self.own_name.startswith(target + "/"):
            raise DAVError(403, "the destination contains the source")
        existing = _with_dav_errors(lambda: self.share.stat(target))
        self.environ["smqrt.created"] = existing is None
        if existing is not None and existing.isdir:
            _with_dav_errors(lambda: self.share.remove_tree(target))
        elif existing is not None and self.is_collection:
            _with_dav_errors(lambda: self.share.remove(target, False))
        return target

    def _release_locks(self) -> None:
        manager = self.provider.lock_manager
        if manager is not None:
            manager.remove_all_locks_from_url(_lock_key(self.own_name, self.is_collection), recursive=True)


class _Folder(_Resource, DAVCollection):  # type: ignore[misc]
    def get_member_names(self) -> list[str]:
        """Return no names, because `Properties` lists folders."""
        return []

    def create_empty_resource(self, name: str) -> _File:
        """Create an empty file for LOCK. For PUT, the file is created after all of its bytes have arrived."""
        path = _child_path(self.own_name, unescaped(name))
        if self.environ["smqrt.path"].endswith("/"):
            raise DAVError(409, "the name of a file must not end with a slash")
        if not self.share.shows(path):
            raise DAVError(403, "the name is private")
        self.provider.forget_properties(path)
        if self.environ["REQUEST_METHOD"] == "PUT":
            return _File(path, self.environ, None)

        def create() -> None:
            with self.share.new_file(path) as upload:
                upload.finish()

        _with_dav_errors(create)
        return _File(path, self.environ, self.share.stat(path))

    def create_collection(self, name: str) -> None:
        """Create a folder."""
        path = _child_path(self.own_name, unescaped(name))
        _with_dav_errors(lambda: self.share.mkdir(path))
        self.provider.forget_properties(path)


class _File(_Resource, DAVNonCollection):  # type: ignore[misc]
    def get_content_length(self) -> int | None:
        """Return the size in bytes."""
        return self.stat.size if self.stat else None

    def get_content(self) -> BytesIO:
        """Return an empty file, because `StaticFiles` serves downloads."""
        return BytesIO()

    def get_etag(self) -> str | None:
        """Return the entity tag without its quotes."""
        return etag(self.stat).strip('"') if self.stat else None

    def support_etag(self) -> bool:
        """Return True."""
        return True

    def begin_write(self, *, content_type: str | None = None) -> _Writer:
        """Begin a PUT and return its file."""
        upload = self.environ["smqrt.upload"] = _with_dav_errors(lambda: self.share.new_file(self.own_name))
        return _Writer(upload)

    def end_write(self, *, with_errors: bool) -> None:
        """End a PUT."""
        if not with_errors:
            self.stat = _with_dav_errors(lambda: self.share.stat(self.own_name))


class _Writer:
    """The file that WsgiDAV writes an upload to."""

    def __init__(self, upload: NewFile) -> None:
        self._upload = upload

    def write(self, data: bytes) -> None:
        """Append bytes."""
        _with_dav_errors(lambda: self._upload.write(data))

    def close(self) -> None:
        """Complete the file."""
        _with_dav_errors(self._upload.finish)


class _Methods(RequestServer):  # type: ignore[misc]
    """WsgiDAV's methods, some of them replaced."""

    _davProvider: _Provider

    def do_PROPFIND(self, environ: Environ, start: Start) -> Iterator[bytes]:
        """Respond to PROPFIND, entry by entry."""
        provider, depth = self._davProvider, environ.get("HTTP_DEPTH", "infinity")
        if depth not in ("0", "1", "infinity"):
            raise HttpError(400, "Depth must be 0, 1 or infinity")
        resource = provider.get_resource_inst(environ["PATH_INFO"], environ)
        if resource is None or resource.stat is None:
            raise HttpError(404)
        locks_of = provider.locks_of if provider.lock_manager else None
        dead_of = provider.properties.of if provider.properties is not None else None
        properties = listing.Properties(environ["smqrt.xml"], locks_of, dead_of)
        found = [(resource.own_name, resource.stat)]
        if resource.is_collection and depth != "0":
            share, folder = resource.share, resource.own_name
            try:
                found += _with_dav_errors(lambda: share.list(folder) if depth == "1" else list(share.walk(folder)))
            except DAVError:
                if depth == "1":
                    raise
                raise DAVError(403, err_condition="{DAV:}propfind-finite-depth") from None
        start("207 Multi-Status", [("Content-Type", "application/xml; charset=utf-8"), ("Cache-Control", "no-store")])
        yield listing.HEAD
        yield from listing.entries(properties, found, provider.bases[0])
        yield listing.TAIL

    def _send_response(self, environ: Environ, start: Start, resource: Any, code: int, errors: list[Any]) -> Any:
        """Send 201 instead of WsgiDAV's 204 if a file was created. Raise an error of the whole request."""
        if errors and errors[0][0] == resource.get_href():
            raise errors[0][1]
        if environ.get("smqrt.created"):
            code = 201
        return super()._send_response(environ, start, resource, code, errors)


def _prepare(environ: Environ, bases: tuple[str, ...]) -> None:
    """Check values that WsgiDAV does not check, and replace the body and the destination.

    Raises:
        HttpError: 400, 403, 413 or 502.
    """
    for field in _LIMITED_FIELDS:
        if len(environ.get(field, "")) > MAX_FIELD_CHARACTERS:
            raise HttpError(400, f"{field[5:].title()} has more than {MAX_FIELD_CHARACTERS} characters")
    environ.setdefault("HTTP_HOST", "")
    environ.pop("HTTP_IF_MODIFIED_SINCE", None)  # for GET and HEAD only (RFC 9110 §13.1.3)
    if parse_date(environ.get("HTTP_IF_UNMODIFIED_SINCE", "")) is None:
        environ.pop("HTTP_IF_UNMODIFIED_SINCE", None)
    method = environ["REQUEST_METHOD"]
    if method in ("COPY", "MOVE", "DELETE") and environ["smqrt.path"] == "/":
        raise HttpError(403, f"{method} is not allowed for the root of the file server")
    if method in ("COPY", "MOVE"):
        hosts = (environ.get("HTTP_HOST", "").lower(), environ.get("HTTP_X_FORWARDED_HOST", "").lower())
        name = destination(environ.get("HTTP_DESTINATION", ""), hosts, bases)
        if not name:
            raise HttpError(403, "the destination must not be the root of the file server")
        if not environ["smqrt.allows"]("PUT", name):
            raise HttpError(403)
        environ["HTTP_DESTINATION"] = href(escaped(bases[0] + name))
    if method in _XML_METHODS:
        body = environ["smqrt.xml"] = environ["wsgi.input"].read(listing.MAX_XML_BYTES + 1)
        if len(body) > listing.MAX_XML_BYTES:
            raise HttpError(413, f"the XML has more than {listing.MAX_XML_BYTES} bytes", close=True)
        if body:
            listing.check(body)
        environ["wsgi.input"], environ["CONTENT_LENGTH"] = BytesIO(body), str(len(body))


class _WithoutPage:
    """`start_response` that removes WsgiDAV's page for 201 responses."""

    def __init__(self, start: Start, method: str) -> None:
        self._start, self._keeps_page, self.empty = start, method == "LOCK", False

    def start(self, status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
        """Call `start_response`."""
        if status.startswith("201") and not self._keeps_page:
            self.empty = True
            headers = [(name, value) for name, value in headers if not name.startswith("Content-")]
        return self._start(status, headers, *more)


def _with_dav_errors(work: Callable[[], T]) -> T:
    """Call `work`, and convert IoError to DAVError."""
    try:
        return work()
    except IoError as error:
        raise DAVError(_STATUSES.get(error.word, 500), error.word) from None


def _child_path(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _lock_key(name: str, isdir: bool) -> str:
    """Return WsgiDAV's key of the locks of a name."""
    return quote(escaped("/" + name) + ("/" if isdir and name else ""))
