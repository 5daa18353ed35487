"""Pages of the manifest: what is known of a few hundred compacted files of one node that follow each other.

A page is a JSON file in `manifest/` that never changes: another content has another name, which ends with its digest.
So whoever has read a page needn't look at it again, and a root always finds the pages it was written with.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from smqrt.errors import JournalError

FOLDER = "manifest"
PAGE_FILES = 256
"""A page has at most so many files: reading one takes a millisecond or two."""
PAGE_BYTES = 512 << 10
"""And so many bytes, unless it is one file: those with thousands of topics say more of themselves."""
MOST_TOPICS = 64
"""A file of more topics than this doesn't list them; it has a filter."""
_KEPT_PAGES = 32  # some 20 MB at most


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
        topic_filter: then which names may be in it, see `topicset`; None in files of older versions.
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
class Page:
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
_PAGE_FIELDS = tuple(field.name for field in fields(Page))


def file_from(values: dict[str, Any]) -> DataFile:
    """Returns a file out of its JSON value.

    Raises:
        TypeError: it's none.
    """
    topics, schemas = values.get("topics"), tuple((pattern, ddl) for pattern, ddl in values.get("schemas", ()))
    return DataFile(**{**values, "topics": None if topics is None else tuple(topics), "schemas": schemas})


def page_as_json(page: Page) -> dict[str, Any]:
    """Returns what the root holds of a page."""
    return {name: getattr(page, name) for name in _PAGE_FIELDS}


def _file_text(file: DataFile) -> str:
    values = {name: getattr(file, name) for name in _FILE_FIELDS}
    told = {name: value for name, value in values.items() if value is not None and value != () and value is not False}
    return json.dumps(told, ensure_ascii=False)


def between(files: Sequence[DataFile], start: int, end: int) -> Iterator[DataFile]:
    """Yields those of a page that have numbers from `start` up to, without, `end`."""
    for at in range(bisect_left(files, start, key=lambda file: file.last), len(files)):
        if files[at].first >= end:
            return
        yield files[at]


def cut(files: Iterable[DataFile]) -> Iterator[tuple[Page, bytes, tuple[DataFile, ...]]]:
    """Yields pages (what the root says, their text, their files) of one node's files, which are in order."""
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


def _made(files: list[DataFile], texts: list[str]) -> tuple[Page, bytes, tuple[DataFile, ...]]:
    text = ('{"files": [\n' + ",\n".join(texts) + "\n]}\n").encode()
    name = f"{files[0].node}-{files[0].first:020d}-{_digest(text)}.json"
    return summary(name, files), text, tuple(files)


def _digest(text: bytes) -> str:
    return blake2b(text, digest_size=8).hexdigest()


def summary(name: str, files: Sequence[DataFile]) -> Page:
    """Returns what the root says of a page with these files, at least one."""
    return Page(
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


def parsed(page: Page, text: bytes) -> tuple[DataFile, ...]:
    """Returns the files of a page.

    Raises:
        ValueError: the text isn't that of the page.
    """
    if not page.name.endswith(f"-{_digest(text)}.json"):
        raise ValueError("its content has another checksum than its name says")
    try:
        return tuple(map(file_from, json.loads(text)["files"]))
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it has no proper {error}") from None


@lru_cache(maxsize=_KEPT_PAGES)
def read(journal: Path, page: Page) -> tuple[DataFile, ...]:
    """Returns the files of a page of a journal; the latest pages are kept in memory.

    Raises:
        FileNotFoundError: it was replaced some time ago: read the root anew.
        JournalError: it can't be read.
    """
    path = journal / FOLDER / page.name
    try:
        return parsed(page, path.read_bytes())
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise JournalError(f"{path} can't be read: {error}; `smqrt journal verify` tells more.") from None
