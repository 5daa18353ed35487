"""Manifest of a journal: the Parquet files, and the rows in them.

Readers take rows below a node's `compacted_through` from Parquet files, the others from segments. The root,
`manifest.json`, is small and lists pages with their ranges, so that a reader finds a few files without the entries of
all others. A page, a JSON file in `manifest/`, describes a few hundred consecutive files of one node. It never changes:
its name ends with the digest of its content. So a page can be cached without a time limit, and a root always refers to
the pages it was written with. Pages are cut by the number of files, not by day: they don't overlap, stay short, and are
found by bisection (decision 0014).

All changes go through `edit`, and are atomic: new pages get new names, then the root is replaced.
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
MAX_PAGE_FILES = 256
"""Maximum number of files of a page, so that a page is read in a millisecond or two."""
MAX_PAGE_BYTES = 512 << 10
"""Maximum size of a page, unless it has one file: entries of files with many topics are long."""
MAX_TOPICS = 64
"""The entry of a file with more topics has a Bloom filter instead of the list."""
_CACHED_PAGES = 32  # some 20 MB at most
PAGE_GRACE_S = 120.0
"""Time for which a replaced page stays, since a reader may have the old root."""
EVERYTHING = 1 << 63
"""Greater than every sequence number, for ranges without an end."""


# ---- files and pages


@dataclass(frozen=True, slots=True)
class DataFile:
    """The entry of a Parquet file.

    Attributes:
        path: relative to the journal, `data/date=…/hour=…/<node>-<first>-<last>.parquet`.
        node: the node that wrote its rows.
        first, last: its lowest and highest number; it has all numbers between.
        rows: number of rows.
        ts_min_us, ts_max_us: earliest and latest time, microseconds UTC.
        bytes: its size.
        topics: the topics of its rows; None when there are more than `MAX_TOPICS`.
        topic_filter: with more topics, their `planning.bloom_filter`; None in files of older versions.
        crc32: checksum of the whole file; None in files of older versions, whose pages have no checksums either.
        footer_crc32: checksum of its footer.
        schemas: (topics, DDL) of its column `json`; empty without that column, or in files of older versions.
        variant: whether it has a column `variant`; false in files of older versions.
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
    """The entry of a page in the root.

    Attributes:
        name: the name of its file in `manifest/`.
        node: the node of its files.
        first, last: the lowest and highest number in its files.
        files, rows, bytes: number of files, their rows, and their size.
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
    """Return the entry of a file from its JSON value.

    Raises:
        TypeError: the value is invalid.
    """
    topics, schemas = values.get("topics"), tuple((pattern, ddl) for pattern, ddl in values.get("schemas", ()))
    return DataFile(**{**values, "topics": None if topics is None else tuple(topics), "schemas": schemas})


def page_as_json(page: ManifestPage) -> JsonObject:
    """Return the JSON value of a page's entry in the root."""
    return {name: getattr(page, name) for name in _PAGE_FIELDS}


def files_between(files: Sequence[DataFile], start: int, end: int) -> Iterator[DataFile]:
    """Yield the files of a page that have numbers from `start` up to but not including `end`."""
    for at in range(bisect_left(files, start, key=lambda file: file.last), len(files)):
        if files[at].first >= end:
            return
        yield files[at]


def cut_pages(files: Iterable[DataFile]) -> Iterator[tuple[ManifestPage, bytes, tuple[DataFile, ...]]]:
    """Yield pages (entry in the root, text, files) for one node's files in ascending order."""
    page_files: list[DataFile] = []
    texts: list[str] = []
    size = 0
    for file in files:
        fields = ((name, getattr(file, name)) for name in _FILE_FIELDS)
        given = {name: value for name, value in fields if value is not None and value != () and value is not False}
        text = json.dumps(given, ensure_ascii=False)
        if page_files and (len(page_files) == MAX_PAGE_FILES or size + len(text) > MAX_PAGE_BYTES):
            yield _encode_page(page_files, texts)
            page_files, texts, size = [], [], 0
        page_files.append(file)
        texts.append(text)
        size += len(text)
    if page_files:
        yield _encode_page(page_files, texts)


def _encode_page(files: list[DataFile], texts: list[str]) -> tuple[ManifestPage, bytes, tuple[DataFile, ...]]:
    text = ('{"files": [\n' + ",\n".join(texts) + "\n]}\n").encode()
    name = f"{files[0].node}-{files[0].first:020d}-{_digest(text)}.json"
    return page_of(name, files), text, tuple(files)


def _digest(text: bytes) -> str:
    return blake2b(text, digest_size=8).hexdigest()


def page_of(name: str, files: Sequence[DataFile]) -> ManifestPage:
    """Return the entry of a page with these files, at least one."""
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
        ValueError: the text doesn't match the page's digest, or is invalid.
    """
    if not page.name.endswith(f"-{_digest(text)}.json"):
        raise ValueError("the digest in its name doesn't match its content")
    try:
        return tuple(map(file_from_json, json.loads(text)["files"]))
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"a field is missing or invalid ({error!r})") from None


@lru_cache(maxsize=_CACHED_PAGES)
def load_page(journal: Path, page: ManifestPage) -> tuple[DataFile, ...]:
    """Return the files of a page of a journal; the latest pages are cached.

    Raises:
        FileNotFoundError: the page was replaced some time ago: load the manifest again.
        JournalError: the page can't be read.
    """
    path = journal / PAGES_FOLDER / page.name
    try:
        return parse_page(page, path.read_bytes())
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise JournalError(f"{path} can't be read: {error}; run `smqrt journal verify`.") from None


# ---- the root


ReadPage = Callable[[ManifestPage], Sequence[DataFile]]


class Manifest:
    """The compacted files of a journal. It is immutable; `edit` changes the manifest on the disk.

    Args:
        nodes: by node, the number below which rows are in Parquet files.
        listed: the pages, in any order.
        read_page: returns the files of a page, ascending.
        settled: by node, the number below which files are merged completely; 0 for a missing node.

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
        self._pages = {node: list(pages) for node, pages in groupby(ordered, lambda page: page.node)}

    def pages(self, node: str | None = None) -> list[ManifestPage]:
        """Return the pages of a node, or of all, ascending."""
        if node is not None:
            return list(self._pages.get(node, ()))
        return [page for pages in self._pages.values() for page in pages]

    def first(self, node: str) -> int | None:
        """Return the lowest number of a node in a file; None without a file."""
        pages = self._pages.get(node)
        return pages[0].first if pages else None

    def files(
        self,
        node: str,
        start: int = 0,
        end: int = EVERYTHING,
        wanted: Callable[[ManifestPage], bool] = lambda page: True,
    ) -> Iterator[DataFile]:
        """Yield the files of a node that have numbers of a range, ascending.

        Args:
            node: the node.
            start, end: the range; `end` is exclusive.
            wanted: returns whether a page is read.

        Raises:
            FileNotFoundError: a page was replaced meanwhile: load the manifest again.
            JournalError: a page can't be read.
        """
        pages = self._pages.get(node, [])
        for at in range(bisect_left(pages, start, key=lambda page: page.last), len(pages)):
            if pages[at].first >= end:
                return
            if wanted(pages[at]):  # before the page is read
                yield from files_between(self.read_page(pages[at]), start, end)

    def all_files(self) -> Iterator[DataFile]:
        """Yield the files of all nodes; raises as `files`."""
        for node in self._pages:
            yield from self.files(node)


def parse(values: JsonObject, read_page: ReadPage) -> Manifest:
    """Return the manifest from the JSON value of a root. Version 1 had no pages.

    Args:
        values: the root.
        read_page: returns the files of a page.

    Raises:
        ValueError: the value is invalid, or has another version.
    """
    try:
        version = values["version"]
        if isinstance(version, int) and version > VERSION:
            raise ValueError(f"it has format {version}, written by a newer smqrt; this one reads up to {VERSION}")
        if version not in (1, VERSION):
            raise ValueError(f"it has the unknown format {version!r}")
        nodes = {node: int(one["compacted_through"]) for node, one in values["nodes"].items()}
        if version == 1:
            return _in_memory(nodes, map(file_from_json, values["files"]))
        settled = {node: int(one["settled"]) for node, one in values["nodes"].items() if "settled" in one}
        return Manifest(nodes, [ManifestPage(**one) for one in values["pages"]], read_page, settled)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a field is missing or invalid ({error!r})") from None


def _in_memory(nodes: Mapping[str, int], files: Iterable[DataFile]) -> Manifest:
    """Return a manifest with pages that are not on disk."""
    ordered = sorted(files, key=lambda file: (file.node, file.first))
    found: dict[ManifestPage, Sequence[DataFile]] = {}
    for _, group in groupby(ordered, lambda file: file.node):
        node_files = list(group)
        for at in range(0, len(node_files), MAX_PAGE_FILES):
            page_files = node_files[at : at + MAX_PAGE_FILES]
            found[page_of("", page_files)] = page_files
    return Manifest(nodes, found, found.__getitem__)


def _as_json(nodes: Mapping[str, int], listed: Iterable[ManifestPage], settled: Mapping[str, int]) -> JsonObject:
    of_nodes = {node: {"compacted_through": through} for node, through in nodes.items()}
    for node, below in settled.items():
        of_nodes.setdefault(node, {"compacted_through": 0})["settled"] = below
    return {"version": VERSION, "nodes": of_nodes, "pages": list(map(page_as_json, listed))}


# ---- on disk

_cached_roots: dict[Path, tuple[tuple[int, int, int], Manifest]] = {}
_MAX_CACHED_ROOTS = 8


def load(journal: Path) -> Manifest:
    """Return the manifest of a journal without reading its pages. A missing file means that no row is compacted.

    An unchanged file is not read again, since every operation on a journal needs the manifest.

    Raises:
        JournalError: it can't be read.
    """
    path = journal / FILE
    try:
        found = path.stat()
        version = (found.st_ino, found.st_mtime_ns, found.st_size)
        cached = _cached_roots.get(path)
        if cached is None or cached[0] != version:
            while len(_cached_roots) >= _MAX_CACHED_ROOTS:
                _cached_roots.pop(next(iter(_cached_roots)), None)  # None: another thread may have removed it
            manifest = parse(json.loads(path.read_bytes()), lambda page: load_page(journal, page))
            cached = _cached_roots[path] = version, manifest
        return cached[1]
    except FileNotFoundError:
        return _in_memory({}, ())
    except (OSError, ValueError, RecursionError) as error:
        raise JournalError(f"{path} can't be read: {error}; run `smqrt journal verify`.") from None


def text(journal: Path) -> bytes:
    """Return the root of a journal's manifest as JSON. Raises as `load`."""
    manifest = load(journal)  # raises an error for an invalid file
    try:
        return (journal / FILE).read_bytes()
    except FileNotFoundError:
        return json.dumps(_as_json(manifest.nodes, (), {})).encode()


class ManifestEdit:
    """Changes to a manifest; `edit` yields one.

    Attributes:
        nodes: by node, the number below which rows are in Parquet files; writable.
        settled: by node, the number below which files are merged completely; writable.
    """

    def __init__(self, before: Manifest) -> None:
        self.nodes, self.settled = dict(before.nodes), dict(before.settled)
        self._before = before
        self._added: dict[str, list[DataFile]] = {}
        self._removed: dict[str, set[DataFile]] = {}

    def add(self, files: Iterable[DataFile]) -> None:
        """Add files."""
        for file in files:
            self._added.setdefault(file.node, []).append(file)

    def remove(self, files: Iterable[DataFile]) -> None:
        """Remove files; a file that is not listed is ignored."""
        for file in files:
            self._removed.setdefault(file.node, set()).add(file)

    def save(self, journal: Path) -> None:
        """Write the new pages, then the root.

        Raises:
            OSError: they can't be written; the root is not changed.
        """
        before = self._before.pages()
        unnamed = {page.node for page in before if not page.name}  # of version 1: not on disk yet
        changed_nodes = unnamed | self._added.keys() | self._removed.keys()
        listed = [page for page in before if page.node not in changed_nodes]
        for node in changed_nodes:
            listed += self._updated_pages(journal, node)
        if listed:
            sync_folder(journal / PAGES_FOLDER)  # the disk has all pages before it has the root
        write_json(journal / FILE, _as_json(self.nodes, listed, self.settled))
        names = {page.name for page in listed}
        folder = journal / PAGES_FOLDER
        for name in {page.name for page in before} - names - {""}:  # the grace period of replaced pages begins now
            with suppress(FileNotFoundError):
                os.utime(folder / name)
        for path in folder.glob("*"):  # also pages that a crash left behind
            with suppress(FileNotFoundError):
                if path.name not in names and age_s(path) > PAGE_GRACE_S:
                    path.unlink()

    def _updated_pages(self, journal: Path, node: str) -> Iterator[ManifestPage]:
        """Write the changed pages of a node, and yield all its pages.

        It writes the pages with changed files, the page before them, which may have space, and pages of version 1.
        """
        known = self._before.pages(node)
        added, removed = self._added.get(node, []), self._removed.get(node, set())
        changed = [*added, *removed]
        begin, end = 0, len(known)
        if all(page.name for page in known):
            first = min((file.first for file in changed), default=0)
            last = max((file.last for file in changed), default=0)
            begin = max(0, bisect_left(known, first, key=lambda page: page.last) - 1)
            end = next((at for at in range(begin, len(known)) if known[at].first > last), len(known))
        files = {file for page in known[begin:end] for file in self._before.read_page(page)}
        remaining = sorted((files - removed) | {*added}, key=lambda file: file.first)
        yield from known[:begin]
        for page, content, _ in cut_pages(remaining):
            path = journal / PAGES_FOLDER / page.name
            if not path.exists():  # else the content is the same, since the name has its digest
                make_folder(path.parent)
                write_whole(path, content)
            yield page
        yield from known[end:]


@contextmanager
def edit(journal: Path) -> Iterator[ManifestEdit]:
    """Yield changes to the manifest, and save them at the end. Other processes that edit it wait until then.

    Args:
        journal: the journal's folder.

    Raises:
        JournalError: it can't be read or written.
    """
    fd = os.open(journal / f".{FILE}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        _cached_roots.pop(journal / FILE, None)  # another process may have changed it within a clock tick
        changes = ManifestEdit(load(journal))
        yield changes
        try:
            changes.save(journal)
        except OSError as error:
            raise JournalError(f"{journal / FILE} can't be written: {error.strerror}; make room on the disk.") from None
    finally:
        os.close(fd)


def write_json(path: Path, value: object) -> None:
    """Replace a file with a JSON value, atomically.

    Raises:
        OSError: the disk is full or broken.
    """
    write_whole(path, json.dumps(value).encode())
