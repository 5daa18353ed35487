"""Private files: what no client is shown though it lies in a folder that is served (help: security).

Source code, keys, databases, settings, the journals of hubs and the code of pipelines. What begins with a dot is hidden
everywhere, see `hidden`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

_SOURCES = (".lua", ".luac", ".py", ".pyc", ".pyo", ".pyw", ".lsp")
_KEYS = (".pem", ".key", ".p12", ".pfx")
_DATABASES = (".db", ".db3", ".sqlite", ".sqlite3", ".db-journal", ".sqlite-journal", ".sqlite3-journal")
_BESIDE_DATABASES = ("-wal", "-shm", "-lock")  # whatever the database is called
_RECORDS = (".arrow", ".arrows", ".parquet")
_PRIVATE = (*_SOURCES[:-1], *_KEYS, *_DATABASES, *_BESIDE_DATABASES, *_RECORDS)
_SETTINGS = frozenset(("smqrt.toml", "mako.conf"))
_BACKUPS = frozenset(("bak", "old", "orig", "rej", "save", "swp", "swo", "tmp"))  # endings that editors add
_INDEX = re.compile(r"[0-9]+\.idx")  # beside a segment of a journal
_PIPELINES, _PIPELINE = "/pipelines/", (".py", ".sql")
_JOURNAL = frozenset(("token", "hub.json", "manifest.json", "manifest", "wal", "data", "retired", "readers"))
_TRANSACTIONS = "txn"  # how a journal's lists of finished batches begin
MAGICS = (
    b"SQLite format 3\0",
    b"\x37\x7f\x06\x82",  # its write-ahead log
    b"\x37\x7f\x06\x83",
    b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7",  # its rollback journal
)
MAGIC_BYTES = 16


class Private:
    """Tells which files are private, by name and by what they begin with.

    Args:
        served: patterns of names that are served nevertheless, such as `*.py`; journals, pipelines and what is hidden
            are not opened by them.
    """

    def __init__(self, served: str | Iterable[str] = ()) -> None:
        words = served.split(",") if isinstance(served, str) else served
        self._served = tuple(word.strip().lower() for word in words if word.strip())

    def name(self, path: str) -> bool:
        """Whether a path is private: absolute on a disk, relative to its top in an archive."""
        if _is_pipeline(f"/{path.lower()}") or (path.startswith("/") and _in_journal(path)):
            return True
        name = _plain(path)
        return not self._is_served(name) and _is_private(name)

    def content(self, path: str, beginning: bytes) -> bool:
        """Whether a file that begins so is private under any name: databases may be called anything."""
        return beginning.startswith(MAGICS) and not self._is_served(_plain(path))

    def _is_served(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._served)


class NothingPrivate(Private):
    """For files that the server itself shows to whom it may."""

    def name(self, path: str) -> bool:
        """See `Private.name`."""
        return False

    def content(self, path: str, beginning: bytes) -> bool:
        """See `Private.content`."""
        return False


def disguised(name: str, real: str) -> bool:
    """Whether a link shows something hidden, or a page's source, under another kind of name."""
    return hidden(real) > hidden(name) or (is_page(real) and not is_page(name))


def hidden(path: str) -> bool:
    """Whether a path is closed to clients: it has a part that begins with a dot, or is an include file (spec: runtime
    §5.5)."""
    return "/." in path or path[:1] == "." or path[-6:].lower() == ".shtml"


def is_page(path: str) -> bool:
    """Whether a path names a Lua Server Page, in any letter case."""
    return path[-4:].lower() == ".lsp"


def _plain(path: str) -> str:
    """The last part in lower case, without what some systems drop at its end."""
    return path.rpartition("/")[2].lower().partition("::$")[0].rstrip(". ")


def _is_private(name: str) -> bool:
    if name.endswith(_PRIVATE) or name in _SETTINGS or _INDEX.fullmatch(name) is not None:
        return True
    saved = _without_backup(name)
    return saved != name and (saved.endswith((*_SOURCES, *_PRIVATE)) or saved in _SETTINGS)


def _without_backup(name: str) -> str:
    """`page.lsp` for `page.lsp~`, `page.lsp.bak` and `page.lsp.~1~`."""
    stem, dot, end = name.rstrip("~").rpartition(".")
    is_backup = dot and (end in _BACKUPS or end.strip("~").isdecimal())
    return stem if is_backup else name.rstrip("~")


def _is_pipeline(path: str) -> bool:
    return path.endswith(_PIPELINE) and _PIPELINES in path


def _in_journal(path: str) -> bool:
    """Whether an absolute path is inside a journal: `journal.path` may be a folder that no dot hides."""
    start = 1
    for part in path[1:].split("/"):
        if (part in _JOURNAL or part.startswith(_TRANSACTIONS)) and _is_journal(path[:start]):
            return True
        start += len(part) + 1
    return False


def _is_journal(folder: str) -> bool:
    if not os.path.isdir(folder + "wal"):  # the usual case: `glob` takes fifty times as long to see it
        return False
    return any(Path(folder, "wal").glob("*/lock"))
