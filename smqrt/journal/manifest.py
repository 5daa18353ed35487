"""The manifest of a journal: which rows are Parquet by now, and in which files.

Readers take rows below a node's `compacted_through` from Parquet and the others from its segments. The root,
`manifest.json`, is small and lists pages with what is in them, so that nobody reads what is known of all files in order
to find a few. A page, a JSON file in `manifest/`, says what is known of a few hundred files of one node that follow
each other. It never changes: another content has another name, which ends with its digest. So whoever has read a page
needn't look at it again, and a root always finds the pages it was written with. Pages are cut by number of rows, not by
day: so they neither overlap nor become long, and a range of numbers finds them by bisection (decision 0014).

Who changes the manifest does so in `edit`, and whole: new pages get new names, then the root is replaced.
"""

from __future__ import annotations

import fcntl
import json
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import lru_cache
from hashlib import blake2b
from itertools import groupby
from pathlib import Path

from smqrt.errors import JournalError
from smqrt.journal.files import FILE_MODE, JsonObject, age_s, make_folder, sync_folder, write_whole

FILE = "manifest.json"
VERSION = 2
PAGES_FOLDER = "manifest"
PAGE_FILES = 256
"""A page has at most so many files: reading one takes a millisecond or two."""
PAGE_BYTES = 512 << 10
"""And so many bytes, unless it is one file: those with thousands of topics say more of themselves."""
MOST_TOPICS = 64
"""A file of more topics than this doesn't list them; it has a filter."""
_KEPT_PAGES = 32  # some 20 MB at most
PAGE_GRACE_S = 120.0
"""So long a page stays that no root lists any more: a reader may have the old root."""
EVERYTHING = 1 << 63
"""Behind every number of a row."""


# ---- files and pages


@dataclass(frozen=True, slots=True)
class DataFile:
    """A Parquet file.

    Attributes:
        path: relative to the journal, `data/date=…/hour=…/<node>-<first>-<last>.parquet`.
        node: whose rows.
        first, last: its lowest and highest number; all between are in it.
        rows: how many.
        ts_min_us, ts_max_us: earliest and latest time, microseconds UTC.
        bytes: its size.
        topics: the names in it; None when there are more than `MOST_TOPICS`.
        topic_filter: then which names may be in it, see `filters.bloom_filter`; None in files of older versions.
        crc32: of the whole file; None in files of older versions, whose pages have no checksums either.
        footer_crc32: of its footer, which says what is where.
        schemas: (topics, DDL) that its column `json` was made with; none when it has no such column, or an older
            version wrote it.
        variant: whether it has a column `variant`; not known of older versions.
    """

    path: str
    node: str
    first: int
    last: int
    rows: int
    ts_min_us: int
    ts_max_us: int
    bytes: int
    topics: tuple[str, ...] | None = None
    topic_filter: str | None = None
    crc32: int | None = None
    footer_crc32: int | None = None
    schemas: tuple[tuple[str, str], ...] = ()
    variant: bool = False


@dataclass(frozen=True, slots=True)
class ManifestPage:
    """What the root says of a page.

    Attributes:
        name: of its file in `manifest/`.
        node: whose files.
        first, last: the lowest and highest number in them.
        files, rows, bytes: how many files, their rows, and their size.
        ts_min_us, ts_max_us: earliest and latest time, microseconds UTC.
    """

    name: str
    node: str
    first: int
    last: int
    files: int
    rows: int
    bytes: int
    ts_min_us: int
    ts_max_us: int


_FILE_FIELDS = tuple(field.name for field in fields(DataFile))
_PAGE_FIELDS = tuple(field.name for field in fields(ManifestPage))


def file_from_json(values: JsonObject) -> DataFile:
    """Return a file out of its JSON value.

    Raises:
        TypeError: The value is invalid.
    """
    topics, schemas = values.get("topics"), tuple((pattern, ddl) for pattern, ddl in values.get("schemas", ()))
    return DataFile(**{**values, "topics": None if topics is None else tuple(topics), "schemas": schemas})


def page_as_json(page: ManifestPage) -> JsonObject:
    """Return what the root holds of a page."""
    return {name: getattr(page, name) for name in _PAGE_FIELDS}


def _file_text(file: DataFile) -> str:
    values = {name: getattr(file, name) for name in _FILE_FIELDS}
    told = {name: value for name, value in values.items() if value is not None and value != () and value is not False}
    return json.dumps(told, ensure_ascii=False)


def files_between(files: Sequence[DataFile], start: int, end: int) -> Iterator[DataFile]:
    """Yield those of a page that have numbers from `start` up to but not including `end`."""
    for at in range(bisect_left(files, start, key=lambda file: file.last), len(files)):
        if files[at].first >= end:
            return
        yield files[at]


def cut_pages(files: Iterable[DataFile]) -> Iterator[tuple[ManifestPage, bytes, tuple[DataFile, ...]]]:
    """Yield pages (what the root says, their text, their files) of one node's files, which are in order."""
    some: list[DataFile] = []
    texts: list[str] = []
    size = 0
    for file in files:
        text = _file_text(file)
        if some and (len(some) == PAGE_FILES or size + len(text) > PAGE_BYTES):
            yield _made(some, texts)
            some, texts, size = [], [], 0
        some.append(file)
        texts.append(text)
        size += len(text)
    if some:
        yield _made(some, texts)


def _made(files: list[DataFile], texts: list[str]) -> tuple[ManifestPage, bytes, tuple[DataFile, ...]]:
    text = ('{"files": [\n' + ",\n".join(texts) + "\n]}\n").encode()
    name = f"{files[0].node}-{files[0].first:020d}-{_digest(text)}.json"
    return page_of(name, files), text, tuple(files)


def _digest(text: bytes) -> str:
    return blake2b(text, digest_size=8).hexdigest()


def page_of(name: str, files: Sequence[DataFile]) -> ManifestPage:
    """Return what the root says of a page with these files, at least one."""
    return ManifestPage(
        name,
        files[0].node,
        files[0].first,
        max(file.last for file in files),
        len(files),
        sum(file.rows for file in files),
        sum(file.bytes for file in files),
        min(file.ts_min_us for file in files),
        max(file.ts_max_us for file in files),
    )


def parse_page(page: ManifestPage, text: bytes) -> tuple[DataFile, ...]:
    """Return the files of a page.

    Raises:
        ValueError: the text isn't that of the page.
    """
    if not page.name.endswith(f"-{_digest(text)}.json"):
        raise ValueError("its content has another checksum than its name says")
    try:
        return tuple(map(file_from_json, json.loads(text)["files"]))
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it has no proper {error}") from None


@lru_cache(maxsize=_KEPT_PAGES)
def load_page(journal: Path, page: ManifestPage) -> tuple[DataFile, ...]:
    """Return the files of a page of a journal; the latest pages are kept in memory.

    Raises:
        FileNotFoundError: it was replaced some time ago: read the root anew.
        JournalError: it can't be read.
    """
    path = journal / PAGES_FOLDER / page.name
    try:
        return parse_page(page, path.read_bytes())
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise JournalError(f"{path} can't be read: {error}; `smqrt journal verify` tells more.") from None


# ---- the root


ReadPage = Callable[[ManifestPage], Sequence[DataFile]]


class Manifest:
    """What is compacted. It doesn't change; `edit` makes another.

    Args:
        nodes: by node, the number below which rows are Parquet.
        listed: the pages, in any order.
        read_page: gives the files of one of them, ascending.
        settled: by node, the number below which no files will be merged any more; 0 where nothing is said.

    Attributes:
        nodes, read_page, settled: as given.
    """

    def __init__(
        self,
        nodes: Mapping[str, int],
        listed: Iterable[ManifestPage],
        read_page: ReadPage,
        settled: Mapping[str, int] = {},
    ) -> None:
        self.nodes, self.settled = dict(nodes), dict(settled)
        self.read_page = read_page
        ordered = sorted(listed, key=lambda page: (page.node, page.first))
        self._pages = {node: list(some) for node, some in groupby(ordered, lambda page: page.node)}

    def pages(self, node: str | None = None) -> list[ManifestPage]:
        """Return the pages of a node, or of all, ascending."""
        if node is not None:
            return list(self._pages.get(node, ()))
        return [page for some in self._pages.values() for page in some]

    def first(self, node: str) -> int | None:
        """Return the lowest number of a node that is in a file; None when there is no file."""
        some = self._pages.get(node)
        return some[0].first if some else None

    def files(
        self,
        node: str,
        start: int = 0,
        end: int = EVERYTHING,
        wanted: Callable[[ManifestPage], bool] = lambda page: True,
    ) -> Iterator[DataFile]:
        """Yield the files of a node that have numbers of a range, ascending.

        Args:
            node: whose.
            start, end: the range; without `end` itself.
            wanted: says of a page whether it is to be read at all.

        Raises:
            FileNotFoundError: a page was replaced meanwhile: load the manifest anew.
            JournalError: a page can't be read.
        """
        some = self._pages.get(node, [])
        for at in range(bisect_left(some, start, key=lambda page: page.last), len(some)):
            if some[at].first >= end:
                return
            if wanted(some[at]):
                yield from files_between(self.read_page(some[at]), start, end)

    def all_files(self) -> Iterator[DataFile]:
        """Yield the files of all nodes; raises as `files`."""
        for node in self._pages:
            yield from self.files(node)


def parse(values: JsonObject, read_page: ReadPage) -> Manifest:
    """Return the manifest out of its JSON value, also one of version 1, which had no pages.

    Args:
        values: the root.
        read_page: gives the files of a page.

    Raises:
        ValueError: it's none, or of another version.
    """
    try:
        version = values["version"]
        if isinstance(version, int) and version > VERSION:
            raise ValueError(f"it has format {version}, written by a newer smqrt; this one reads up to {VERSION}")
        if version not in (1, VERSION):
            raise ValueError(f"format {version!r} is none")
        nodes = {node: int(one["compacted_through"]) for node, one in values["nodes"].items()}
        if version == 1:
            return _of_files(nodes, map(file_from_json, values["files"]))
        settled = {node: int(one["settled"]) for node, one in values["nodes"].items() if "settled" in one}
        return Manifest(nodes, [ManifestPage(**one) for one in values["pages"]], read_page, settled)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it has no proper {error}") from None


def _of_files(nodes: Mapping[str, int], files: Iterable[DataFile]) -> Manifest:
    """Return a manifest whose pages are in memory only."""
    ordered = sorted(files, key=lambda file: (file.node, file.first))
    found: dict[ManifestPage, Sequence[DataFile]] = {}
    for _, of_node in groupby(ordered, lambda file: file.node):
        some = list(of_node)
        for at in range(0, len(some), PAGE_FILES):
            piece = some[at : at + PAGE_FILES]
            found[page_of("", piece)] = piece
    return Manifest(nodes, found, found.__getitem__)


def _as_json(nodes: Mapping[str, int], listed: Iterable[ManifestPage], settled: Mapping[str, int]) -> JsonObject:
    of_nodes = {node: {"compacted_through": through} for node, through in nodes.items()}
    for node, below in settled.items():
        of_nodes.setdefault(node, {"compacted_through": 0})["settled"] = below
    return {"version": VERSION, "nodes": of_nodes, "pages": list(map(page_as_json, listed))}


# ---- on disk

_known: dict[Path, tuple[tuple[int, int, int], Manifest]] = {}
_MAX_CACHED_ROOTS = 8


def load(journal: Path) -> Manifest:
    """Read the manifest of a journal, without its pages; without one, nothing is compacted.

    Raises:
        JournalError: it can't be read.
    """
    path = journal / FILE
    try:
        return _remembered(path)
    except FileNotFoundError:
        return _of_files({}, ())
    except (OSError, ValueError, RecursionError) as error:
        raise JournalError(f"{path} can't be read: {error}; `smqrt journal verify` tells more.") from None


def _remembered(path: Path) -> Manifest:
    """Read a root, unless it is the same file as the last time: it is asked for with every look at a journal."""
    found = path.stat()
    version = (found.st_ino, found.st_mtime_ns, found.st_size)
    known = _known.get(path)
    if known is None or known[0] != version:
        while len(_known) >= _MAX_CACHED_ROOTS:
            _known.pop(next(iter(_known)), None)
        journal = path.parent
        manifest = parse(json.loads(path.read_bytes()), lambda page: load_page(journal, page))
        known = _known[path] = version, manifest
    return known[1]


def text(journal: Path) -> bytes:
    """Return the root of a journal's manifest as JSON. Raises as `load`."""
    manifest = load(journal)  # it is sound
    try:
        return (journal / FILE).read_bytes()
    except FileNotFoundError:
        return json.dumps(_as_json(manifest.nodes, (), {})).encode()


class ManifestEdit:
    """Changes to a manifest; `edit` gives one.

    Attributes:
        nodes: by node, the number below which rows are Parquet; to be changed.
        settled: by node, the number below which no files will be merged any more; to be changed.
    """

    def __init__(self, before: Manifest) -> None:
        self.nodes, self.settled = dict(before.nodes), dict(before.settled)
        self._before = before
        self._added: dict[str, list[DataFile]] = {}
        self._removed: dict[str, set[DataFile]] = {}

    def add(self, files: Iterable[DataFile]) -> None:
        """List files."""
        for file in files:
            self._added.setdefault(file.node, []).append(file)

    def remove(self, files: Iterable[DataFile]) -> None:
        """List files no longer; others may have done the same before."""
        for file in files:
            self._removed.setdefault(file.node, set()).add(file)

    def save(self, journal: Path) -> None:
        """Write the pages that are new, then the root.

        Raises:
            OSError: they can't be written; the root is as before.
        """
        listed = [page for page in self._before.pages() if page.node not in self._touched()]
        for node in self._touched():
            listed += self._node(journal, node)
        if listed:
            sync_folder(journal / PAGES_FOLDER)  # a root never outlives its pages
        write_json(journal / FILE, _as_json(self.nodes, listed, self.settled))
        names = {page.name for page in listed}
        _remove_old_pages(journal, {page.name for page in self._before.pages()} - names - {""}, names)

    def _touched(self) -> set[str]:
        unnamed = {page.node for page in self._before.pages() if not page.name}
        return unnamed | self._added.keys() | self._removed.keys()

    def _node(self, journal: Path, node: str) -> Iterator[ManifestPage]:
        """Yield a node's pages: those before and behind the changes as they are."""
        known, changed = self._before.pages(node), [*self._added.get(node, ()), *self._removed.get(node, ())]
        first, end = _region(known, changed)
        removed = self._removed.get(node, set())
        files = {file for page in known[first:end] for file in self._before.read_page(page)}
        left = sorted(files - removed | {*self._added.get(node, ())}, key=lambda file: file.first)
        yield from known[:first]
        for page, content, _ in cut_pages(left):
            _write_page(journal / PAGES_FOLDER / page.name, content)
            yield page
        yield from known[end:]


def _region(known: Sequence[ManifestPage], changed: Sequence[DataFile]) -> tuple[int, int]:
    """Return which pages (first, after the last) are written anew: those that the changes concern, the one before
    them, which may have room, and what has no page yet.
    """
    first, last = min((file.first for file in changed), default=0), max((file.last for file in changed), default=0)
    begin = max(0, bisect_left(known, first, key=lambda page: page.last) - 1)
    end = next((at for at in range(begin, len(known)) if known[at].first > last), len(known))
    return (0, len(known)) if any(not page.name for page in known) else (begin, end)


def _write_page(path: Path, content: bytes) -> None:
    if not path.exists():  # else it is the same: its name says what is in it
        make_folder(path.parent)
        write_whole(path, content)


def _remove_old_pages(journal: Path, replaced: set[str], listed: set[str]) -> None:
    """Remove pages that were replaced some time ago, and such that a crash left; the grace of others begins now."""
    folder = journal / PAGES_FOLDER
    for name in replaced:
        with suppress(FileNotFoundError):
            os.utime(folder / name)
    for path in folder.glob("*"):
        with suppress(FileNotFoundError):
            if path.name not in listed and age_s(path) > PAGE_GRACE_S:
                path.unlink()


@contextmanager
def edit(journal: Path) -> Iterator[ManifestEdit]:
    """Give the manifest to change, and saves it at the end; others wait meanwhile.

    Raises:
        JournalError: it can't be read or written.
    """
    fd = os.open(journal / f".{FILE}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        _known.pop(journal / FILE, None)
        changes = ManifestEdit(load(journal))
        yield changes
        _saved(changes, journal)
    finally:
        os.close(fd)


def _saved(changes: ManifestEdit, journal: Path) -> None:
    try:
        changes.save(journal)
    except OSError as error:
        raise JournalError(f"{journal / FILE} can't be written: {error.strerror}; make room on the disk.") from None


def write_json(path: Path, value: object) -> None:
    """Write a file that is whole or as before, whatever happens.

    Raises:
        OSError: the disk is full or broken.
    """
    write_whole(path, json.dumps(value).encode())
