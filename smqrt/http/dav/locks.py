"""Locks of a file server, bounded and saved in a folder (RFC 4918 §6, §7)."""

from __future__ import annotations

import json
import logging
import time
from abc import abstractmethod
from typing import Any
from urllib.parse import unquote

from defusedxml import ElementTree
from wsgidav.dav_error import DAVError
from wsgidav.lock_man.lock_storage import LockStorageDict

from smqrt.http.blocking_io import call_blocking
from smqrt.http.dav.names import unescaped
from smqrt.http.resources import Io, IoError

# ---- State of a file server that survives restarts: JSON in a folder of its io.

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
    name = f"{folder}/{file}"
    with io.open(name + ".new", "w") as new:
        new.write(text)
    io.rename(name + ".new", name)


MAX_LOCK_S = 3600
"""Longest lifetime of a lock, also the one that Windows requests. Locks of crashed clients expire after it."""
_BUSY = 503


class Locks(SavedState, LockStorageDict):  # type: ignore[misc]
    """Lock storage for WsgiDAV.

    Args:
        max_locks: limit of locks; beyond it, LOCK gets a response 503.
    """

    file = "locks.json"

    def __init__(self, max_locks: int) -> None:
        SavedState.__init__(self)
        LockStorageDict.__init__(self)
        self.open()
        self._max_locks = max_locks

    def open(self) -> None:
        """Open the storage. The lock manager calls this again, which must not remove the locks."""
        if self._dict is None:
            LockStorageDict.open(self)

    def __len__(self) -> int:
        return len(self.all())

    def all(self) -> list[dict[str, Any]]:
        """Return the locks that have not expired."""
        now_s = time.time()
        return [lock for lock in self._dict.values() if isinstance(lock, dict) and lock["expire"] > now_s]

    def about(self) -> list[tuple[bytes, bytes, bool, bool, int]]:
        """Return path, owner text of the client, whether shared, whether recursive, and seconds left, of each lock."""
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
        return any(
            _path(lock) == name or (lock["depth"] == "infinity" and _inside(name, _path(lock))) for lock in self.all()
        )

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
            raise DAVError(_BUSY, f"limit reached: maxlocks ({self._max_locks})", add_headers=headers)
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
        for lock in [_from_json(each) for each in value][: self._max_locks]:
            self._dict[lock["token"]] = lock
            self._dict.setdefault(f"URL2TOKEN:{lock['root']}", []).append(lock["token"])

    def _flush(self) -> None:
        self.changed = True


def owner_text(owner: bytes) -> str:
    """Return the text of a lock's owner element."""
    try:
        return "".join(ElementTree.fromstring(owner).itertext()).strip()
    except (ElementTree.ParseError, ValueError):
        return ""


def _path(lock: dict[str, Any]) -> str:
    return unescaped(unquote(lock["root"])).strip("/")


def _inside(name: str, folder: str) -> bool:
    return not folder or name.startswith(folder + "/")


def _bounded(timeout_s: float) -> float:
    return min(timeout_s, MAX_LOCK_S) if timeout_s > 0 else MAX_LOCK_S


def _from_json(lock: dict[str, Any]) -> dict[str, Any]:
    texts = {key: str(lock[key]) for key in ("token", "root", "type", "scope", "depth", "principal")}
    times = {key: float(lock[key]) for key in ("timeout", "expire")}
    return {**texts, **times, "owner": str(lock["owner"]).encode()}
