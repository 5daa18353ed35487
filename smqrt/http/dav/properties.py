"""WebDAV locks and properties, and PROPFIND responses (RFC 4918).

Properties that clients set ("dead" ones in RFC 4918) are in memory, bounded, and saved in the folder of the locks.
"""

from __future__ import annotations

import json
import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from urllib.parse import unquote
from xml.parsers.expat import ExpatError, ParserCreate
from xml.sax.saxutils import quoteattr

from defusedxml import ElementTree
from wsgidav.dav_error import DAVError
from wsgidav.lock_man.lock_storage import LockStorageDict

from smqrt.http.dav.share import href, unescaped, xml_text
from smqrt.http.headers import HttpError, http_date
from smqrt.http.open_files import call_blocking
from smqrt.http.resources import Io, IoError, Stat
from smqrt.http.static_files import content_type, etag

# ---- Saved state: JSON in a folder of the file server's io

log = logging.getLogger("smqrt")


class SavedState:
    """State that is saved in a file.

    Attributes:
        file: name of the file.
        changed: whether the state differs from the file.
    """

    file = ""

    def __init__(self) -> None:
        self.changed = False

    @abstractmethod
    def as_json(self) -> object:
        """Return the JSON value for the file."""

    @abstractmethod
    def restore(self, value: object) -> None:
        """Restore the state from the JSON value of the file.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: the value is damaged.
        """

    def load(self, io: Io, folder: str) -> None:
        """Restore the state from a folder, which is created if it is missing; blocks the greenlet.

        Raises:
            IoError: the folder cannot be created.
        """
        text = call_blocking(io, folder, _read, io, folder, self.file)
        if not text:
            return
        try:
            self.restore(json.loads(text))
        except (ValueError, TypeError, KeyError, AttributeError):
            log.warning("%s/%s of a file server is damaged: its content is lost", folder, self.file)

    def save(self, io: Io, folder: str) -> None:
        """Write the file if the state has changed; blocks the greenlet. Raises IoError."""
        if self.changed:
            self.changed = False
            call_blocking(io, folder, _write, io, folder, self.file, json.dumps(self.as_json()).encode())


def _read(io: Io, folder: str, file: str) -> bytes:
    parts = folder.split("/")
    for count in range(1, len(parts) + 1):
        try:
            io.mkdir("/".join(parts[:count]))
        except IoError as error:
            if error.word != "exist":
                raise
    try:
        return io.read(f"{folder}/{file}")
    except IoError:
        return b""


def _write(io: Io, folder: str, file: str, text: bytes) -> None:
    name = f"{folder}/{file}"  # replaced by renaming, so that a crash leaves the old file or the new one
    with io.open(name + ".new", "w") as new:
        new.write(text)
    io.rename(name + ".new", name)


MAX_LOCK_S = 3600
"""Longest lifetime of a lock, which is also the one that Windows requests. Locks of crashed clients expire after it."""


class Locks(SavedState, LockStorageDict):  # type: ignore[misc]
    """Lock storage for WsgiDAV.

    Args:
        max_locks: limit of locks; beyond it, LOCK gets a 503 response.
    """

    file = "locks.json"

    def __init__(self, max_locks: int) -> None:
        SavedState.__init__(self)
        LockStorageDict.__init__(self)
        self.open()
        self._max_locks = max_locks

    def open(self) -> None:
        """Open the storage. A second call does nothing."""
        if self._dict is None:  # the lock manager calls this again, which must not remove the locks
            LockStorageDict.open(self)

    def __len__(self) -> int:
        return len(self.all())

    def all(self) -> list[dict[str, Any]]:
        """Return the locks that have not expired."""
        now_s = time.time()
        return [lock for lock in self._dict.values() if isinstance(lock, dict) and lock["expire"] > now_s]

    def describe(self) -> list[tuple[bytes, bytes, bool, bool, int]]:
        """Return for each lock: path, owner text of the client, is shared, is recursive, seconds until it expires."""
        now_s = time.time()
        return [
            (
                _path(lock).encode("utf-8", "surrogateescape"),
                owner_text(lock["owner"]).encode(),
                lock["scope"] == "shared",
                lock["depth"] == "infinity",
                int(lock["expire"] - now_s),
            )
            for lock in self.all()
        ]

    def guards(self, name: str) -> bool:
        """Return whether a name is locked, by itself or by a folder that contains it."""
        for lock in self.all():
            path = _path(lock)
            if path == name or (lock["depth"] == "infinity" and (not path or name.startswith(path + "/"))):
                return True
        return False

    def release(self, name: str) -> bool:
        """Remove the locks of a name; return whether there were any."""
        tokens = [lock["token"] for lock in self.all() if _path(lock) == name]
        for token in tokens:
            self.delete(token)
        return bool(tokens)

    def create(self, path: str, lock: dict[str, Any]) -> dict[str, Any]:
        """See the base class. Raises DAVError 503 if the limit is reached."""
        now_s = time.time()
        for token in [key for key, each in self._dict.items() if isinstance(each, dict) and each["expire"] <= now_s]:
            self.delete(token)
        if len(self) >= self._max_locks:
            headers = [("Retry-After", "60")]
            raise DAVError(503, f"limit reached: maxlocks ({self._max_locks})", add_headers=headers)
        lock["timeout"] = _bounded(lock["timeout"])
        made: dict[str, Any] = super().create(path, lock)
        return made

    def refresh(self, token: str, *, timeout: float) -> dict[str, Any]:
        """See the base class."""
        fresh: dict[str, Any] = super().refresh(token, timeout=_bounded(timeout))
        return fresh

    def as_json(self) -> object:
        """See `SavedState`."""
        return [{**lock, "owner": lock["owner"].decode("utf-8", "replace")} for lock in self.all()]

    def restore(self, value: object) -> None:
        """See `SavedState`."""
        if not isinstance(value, list):
            raise TypeError
        for lock in [_from_json(each) for each in value][: self._max_locks]:  # all or none, because any may be damaged
            self._dict[lock["token"]] = lock
            self._dict.setdefault(f"URL2TOKEN:{lock['root']}", []).append(lock["token"])

    def _flush(self) -> None:
        """See the base class, which calls this after each change."""
        self.changed = True


def owner_text(owner: bytes) -> str:
    """Return the text of a lock's owner element."""
    try:
        return "".join(ElementTree.fromstring(owner).itertext()).strip()
    except (ElementTree.ParseError, ValueError):
        return ""


def _path(lock: dict[str, Any]) -> str:
    return unescaped(unquote(lock["root"])).strip("/")


def _bounded(timeout_s: float) -> float:
    return min(timeout_s, MAX_LOCK_S) if timeout_s > 0 else MAX_LOCK_S


def _from_json(lock: dict[str, Any]) -> dict[str, Any]:
    texts = {key: str(lock[key]) for key in ("token", "root", "type", "scope", "depth", "principal")}
    times = {key: float(lock[key]) for key in ("timeout", "expire")}
    return {**texts, **times, "owner": str(lock["owner"]).encode()}


# ---- XML checks before parsing

MAX_XML_BYTES = 64 << 10
MAX_DEPTH = 16  # lockinfo with an owner of several elements has 4
MAX_ELEMENTS = 500
MAX_TEXT_CHARACTERS = 4096  # of all text: every listing repeats the owner of a lock


def check(data: bytes) -> None:
    """Reject malformed XML, document types (exponential entities), and deep or large documents.

    Raises:
        HttpError: 400.
    """
    counter = _Counter()
    parser = ParserCreate(namespace_separator=" ")  # then it checks prefixes, as the second parser does
    parser.StartElementHandler = counter.start
    parser.EndElementHandler = counter.end
    parser.CharacterDataHandler = counter.text
    parser.StartDoctypeDeclHandler = counter.doctype
    try:
        parser.Parse(data, True)
    except (ExpatError, ValueError) as error:
        raise HttpError(400, f"the body is not XML: {error}") from None


class _Counter:
    """Limits for the parts of a document; its methods are callbacks of the parser."""

    def __init__(self) -> None:
        self.depth = self.elements = self.characters = 0

    def start(self, name: str, attributes: dict[str, str]) -> None:
        self.depth += 1
        self.elements += 1
        if self.depth > MAX_DEPTH or self.elements > MAX_ELEMENTS:
            raise HttpError(400, f"the XML has more than {MAX_ELEMENTS} elements or {MAX_DEPTH} levels")

    def end(self, name: str) -> None:
        self.depth -= 1

    def text(self, data: str) -> None:
        self.characters += len(data)
        if self.characters > MAX_TEXT_CHARACTERS:
            raise HttpError(400, f"the text in the XML has more than {MAX_TEXT_CHARACTERS} characters")

    def doctype(self, *about: object) -> None:
        raise HttpError(400, "XML with a document type is not accepted")


# ---- Properties that clients set

MAX_PROPERTIES = 1000
"""Limit for one file server; beyond it, setting a property gets a 507 response."""
MAX_VALUE_CHARACTERS = 1024


class DeadProperties(SavedState):
    """The properties of all files: XML by name in Clark notation, by file name."""

    file = "properties.json"

    def __init__(self) -> None:
        super().__init__()
        self._by_name: dict[str, dict[str, str]] = {}
        self._count = 0

    def of(self, name: str) -> dict[str, str]:
        """Return the properties of a file or folder."""
        return self._by_name.get(name, {})

    def has_room(self, name: str, key: str, value: str) -> bool:
        """Return whether a property can be set."""
        known = key in self.of(name)
        return len(value) <= MAX_VALUE_CHARACTERS >= len(key) and (known or self._count < MAX_PROPERTIES)

    def set(self, name: str, key: str, value: str | None) -> None:
        """Set a property; None removes it."""
        properties = self._by_name.setdefault(name, {})
        self._count -= key in properties
        properties.pop(key, None)
        if value is not None:
            properties[key] = value
            self._count += 1
        if not properties:
            del self._by_name[name]
        self.changed = True

    def forget(self, name: str) -> None:
        """Remove the properties of a file or folder and of everything in it."""
        for removed in self._below(name):
            self._count -= len(self._by_name.pop(removed))
            self.changed = True

    def copy(self, old: str, new: str, deep: bool = True) -> None:
        """Copy the properties of a file or folder, up to the limit."""
        self.forget(new)
        for name in self._below(old) if deep else [old]:
            for key, value in self.of(name).items():
                target = new + name[len(old) :]
                if self.has_room(target, key, value):
                    self.set(target, key, value)

    def move(self, old: str, new: str) -> None:
        """Move the properties of a file or folder."""
        self.forget(new)
        for name in self._below(old):
            self._by_name[new + name[len(old) :]] = self._by_name.pop(name)
            self.changed = True

    def as_json(self) -> object:
        """See `SavedState`."""
        return self._by_name

    def restore(self, value: object) -> None:
        """See `SavedState`."""
        if not isinstance(value, dict):
            return
        for name, properties in value.items():
            for key, text in properties.items():
                if self.has_room(str(name), str(key), str(text)):
                    self.set(str(name), str(key), str(text))
        self.changed = False

    def _below(self, name: str) -> list[str]:
        return [each for each in self._by_name if each == name or not name or each.startswith(name + "/")]


# ---- PROPFIND responses (RFC 4918 §9.1)

MAX_NAMES = 64  # of requested properties
MAX_NAMES_CHARACTERS = 4096  # of all requested properties: each entry repeats its missing ones
_BATCH_CHARACTERS = 20 << 10  # of entries that are sent together: usually about 30
_DAV = "{DAV:}"

HEAD = b'<?xml version="1.0" encoding="utf-8"?>\n<D:multistatus xmlns:D="DAV:">'
TAIL = b"</D:multistatus>\n"
_FOUND = "<D:propstat><D:prop>{}</D:prop><D:status>HTTP/1.1 200 OK</D:status></D:propstat>"
_MISSING = "<D:propstat><D:prop>{}</D:prop><D:status>HTTP/1.1 404 Not Found</D:status></D:propstat>"
_ENTRY = "<D:lockentry><D:lockscope><D:{}/></D:lockscope><D:locktype><D:write/></D:locktype></D:lockentry>"
_SUPPORTED = "<D:supportedlock>" + _ENTRY.format("exclusive") + _ENTRY.format("shared") + "</D:supportedlock>"

LocksOf = Callable[[str], list[dict[str, Any]]]
"""Returns the locks of a name in the share."""
DeadOf = Callable[[str], dict[str, str]]
"""Returns the properties that clients have set for a name: XML by Clark names."""


class Properties:
    """The properties that a client requests.

    Args:
        body: body of the request, already checked; empty requests all properties.
        locks_of, dead_of: locks, and properties that clients set, of a name; None if the file server has none.

    Raises:
        HttpError: 400, it is not a propfind element.
    """

    def __init__(self, body: bytes, locks_of: LocksOf | None, dead_of: DeadOf | None) -> None:
        self._locks_of, self._dead_of = locks_of, dead_of or (lambda name: {})
        self._names_only = False
        self._all = False  # whether to include all properties that clients have set
        self._wanted: list[str] = []
        self._others: list[str] = []
        for name in self._read(body):
            if name.removeprefix(_DAV) in self._known() and name.startswith(_DAV):
                self._wanted.append(name.removeprefix(_DAV))
            else:
                self._others.append(name)
        self._missing = "".join(map(_empty, self._others))

    def entry(self, url: str, name: str, stat: Stat) -> str:
        """Return the response element of a file or folder."""
        dead = self._dead_of(name)
        found: list[str] = []
        missing = self._missing
        if dead and self._all:
            found, missing = [_empty(key) for key in dead] if self._names_only else list(dead.values()), ""
        elif dead:
            found = [dead[key] for key in self._others if key in dead]
            missing = "".join(_empty(key) for key in self._others if key not in dead)
        for wanted in self._wanted:
            text: str | None
            if self._names_only:
                text = f"<D:{wanted}/>"
            elif wanted == "supportedlock":
                text = _SUPPORTED
            elif wanted == "lockdiscovery":
                text = lock_discovery(self._locks_of(name) if self._locks_of else [])
            else:
                value = _LIVE[wanted](name, stat)
                text = None if value is None else f"<D:{wanted}>{value}</D:{wanted}>"
            if text is None:
                missing += f"<D:{wanted}/>"
            else:
                found.append(text)
        groups = (_FOUND.format("".join(found)) if found or not missing else "") + (
            _MISSING.format(missing) if missing else ""
        )
        return f"<D:response><D:href>{xml_text(url)}</D:href>{groups}</D:response>"

    def _known(self) -> list[str]:
        return [*_LIVE, *(("lockdiscovery", "supportedlock") if self._locks_of else ())]

    def _read(self, body: bytes) -> list[str]:
        """Return the requested names in Clark notation; set `_all` and `_names_only`."""
        everything = [_DAV + name for name in self._known()]
        if not body:
            self._all = True
            return everything
        root = ElementTree.fromstring(body)
        if root.tag != "{DAV:}propfind":
            raise HttpError(400, "the body is not a propfind element")
        modes = {child.tag: child for child in root}
        if "{DAV:}prop" in modes:
            names = list(dict.fromkeys(child.tag for child in modes["{DAV:}prop"]))
            if len(names) > MAX_NAMES:
                raise HttpError(400, f"more than {MAX_NAMES} properties at once")
            if sum(map(len, names)) > MAX_NAMES_CHARACTERS:
                raise HttpError(400, f"the names of the properties have more than {MAX_NAMES_CHARACTERS} characters")
            return names
        self._names_only = "{DAV:}propname" in modes
        if not self._names_only and "{DAV:}allprop" not in modes:
            raise HttpError(400, "propfind needs allprop, propname or prop")
        self._all = True
        return everything


def lock_discovery(locks: list[dict[str, Any]]) -> str:
    """Return the lockdiscovery element."""
    return f"<D:lockdiscovery>{''.join(map(_active, locks))}</D:lockdiscovery>"


def entries(properties: Properties, found: Iterable[tuple[str, Stat]], base: str) -> Iterator[bytes]:
    """Yield the response elements of files and folders in batches.

    Args:
        properties: the requested properties.
        found: names in the share with their stats.
        base: path of the share, with "/" at its end.
    """
    batch: list[str] = []
    characters = 0
    for name, stat in found:
        url = href(base + name + ("/" if stat.isdir and name else ""))
        batch.append(properties.entry(url, name, stat))
        characters += len(batch[-1])
        if characters >= _BATCH_CHARACTERS:
            yield "".join(batch).encode()
            batch.clear()
            characters = 0
    yield "".join(batch).encode()


def _active(lock: dict[str, Any]) -> str:
    left_s = max(0, int(lock["expire"] - time.time()))
    return (
        f"<D:activelock><D:locktype><D:write/></D:locktype><D:lockscope><D:{lock['scope']}/></D:lockscope>"
        f"<D:depth>{lock['depth']}</D:depth>{_owner(lock['owner'])}<D:timeout>Second-{left_s}</D:timeout>"
        f"<D:locktoken><D:href>{xml_text(lock['token'])}</D:href></D:locktoken>"
        f"<D:lockroot><D:href>{xml_text(lock['href'])}</D:href></D:lockroot></D:activelock>"
    )


def _owner(text: bytes) -> str:
    """Return the owner element of a lock as the client wrote it: text, or an href element."""
    try:
        owner = ElementTree.fromstring(text)
    except Exception:  # of several types, also for an empty owner
        return ""
    inner = xml_text("".join(owner.itertext()).strip())
    return f"<D:owner>{'<D:href>' + inner + '</D:href>' if len(owner) else inner}</D:owner>"


def _empty(name: str) -> str:
    space, _, own = name.rpartition("}")
    return f"<x:{own} xmlns:x={quoteattr(space[1:])}/>" if space else f"<{own}/>"


def _time(name: str, stat: Stat) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(stat.mtime))


_LIVE: dict[str, Callable[[str, Stat], str | None]] = {
    "creationdate": _time,
    "displayname": lambda name, stat: xml_text(name.rpartition("/")[2]),
    "getcontentlength": lambda name, stat: None if stat.isdir else str(stat.size),
    "getcontenttype": lambda name, stat: None if stat.isdir else xml_text(content_type(name)),
    "getetag": lambda name, stat: None if stat.isdir else xml_text(etag(stat)),
    "getlastmodified": lambda name, stat: http_date(stat.mtime),
    "resourcetype": lambda name, stat: "<D:collection/>" if stat.isdir else "",
}
