"""`manifest.json`: which rows are Parquet by now, and in which files. And how far pipelines have read (`readers/`).

Readers take rows below a node's `compacted_through` from Parquet and the others from its segments. Who changes the
manifest does it in `edit`, and whole: a reader sees the old one or the new one.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from smqrt.errors import JournalError
from smqrt.journal.files import FILE_MODE, touch

FILE = "manifest.json"
VERSION = 1
MOST_TOPICS = 64
"""A file of more topics than this doesn't list them."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """A Parquet file.

    Attributes:
        path: relative to the journal, `data/date=…/hour=…/<node>-<first>-<last>.parquet`.
        node: whose rows.
        first, last: its lowest and highest number; numbers between may be in other files.
        rows: how many.
        ts_min_us, ts_max_us: earliest and latest time, microseconds UTC.
        bytes: its size.
        topics: the names in it; None when there are more than `MOST_TOPICS`.
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


@dataclass
class Manifest:
    """What is compacted.

    Attributes:
        nodes: by node, the number below which rows are Parquet.
        files: the Parquet files, in any order.
    """

    nodes: dict[str, int] = field(default_factory=dict)
    files: list[DataFile] = field(default_factory=list)


_known: dict[Path, tuple[tuple[int, int, int], Manifest]] = {}
_MOST_KNOWN = 8


def parse(values: Any) -> Manifest:
    """Returns the manifest out of its JSON value.

    Raises:
        ValueError: it's none, or of another version.
    """
    try:
        if values["version"] != VERSION:
            raise ValueError(f"version {values['version']} is not {VERSION}")
        nodes = {node: int(one["compacted_through"]) for node, one in values["nodes"].items()}
        return Manifest(nodes, [_data_file(one) for one in values["files"]])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it has no proper {error}") from None


def _data_file(values: dict[str, Any]) -> DataFile:
    topics = values.get("topics")
    return DataFile(**{**values, "topics": None if topics is None else tuple(topics)})


def as_json(manifest: Manifest) -> dict[str, Any]:
    """Returns what `manifest.json` holds."""
    nodes = {node: {"compacted_through": through} for node, through in manifest.nodes.items()}
    return {"version": VERSION, "nodes": nodes, "files": [asdict(one) for one in manifest.files]}


def load(journal: Path) -> Manifest:
    """Reads the manifest of a journal; without one, nothing is compacted.

    Raises:
        JournalError: it can't be read.
    """
    path = journal / FILE
    try:
        return _remembered(path)
    except FileNotFoundError:
        return Manifest()
    except (OSError, ValueError, RecursionError) as error:
        raise JournalError(f"{path} can't be read: {error}; `smqrt journal verify` tells more.") from None


def _remembered(path: Path) -> Manifest:
    """Reads a manifest, unless it is the same file as the last time: it is asked for with every look at a journal, and
    may list ten thousands of files.
    """
    found = path.stat()
    version = (found.st_ino, found.st_mtime_ns, found.st_size)
    known = _known.get(path)
    if known is None or known[0] != version:
        while len(_known) >= _MOST_KNOWN:
            _known.pop(next(iter(_known)), None)
        known = _known[path] = version, parse(json.loads(path.read_bytes()))
    return Manifest(dict(known[1].nodes), list(known[1].files))


def text(journal: Path) -> bytes:
    """Returns the manifest of a journal as JSON. Raises as `load`."""
    load(journal)  # it is sound
    try:
        return (journal / FILE).read_bytes()
    except FileNotFoundError:
        return json.dumps(as_json(Manifest())).encode()


def save(journal: Path, manifest: Manifest) -> None:
    """Writes the manifest of a journal. Use `edit`, so that two can't do it at once.

    Raises:
        JournalError: it can't be written.
    """
    try:
        write_json(journal / FILE, as_json(manifest))
    except OSError as error:
        raise JournalError(f"{journal / FILE} can't be written: {error.strerror}; make room on the disk.") from None


@contextmanager
def edit(journal: Path) -> Iterator[Manifest]:
    """Gives the manifest to change, and saves it at the end; others wait meanwhile.

    Raises:
        JournalError: as `load` and `save`.
    """
    fd = os.open(journal / f".{FILE}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        _known.pop(journal / FILE, None)
        manifest = load(journal)
        yield manifest
        save(journal, manifest)
    finally:
        os.close(fd)


def write_json(path: Path, value: Any) -> None:
    """Writes a file that is whole or as before, whatever happens.

    Raises:
        OSError: the disk is full or broken.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        touch(beside)
        with beside.open("w", encoding="utf-8") as file:
            json.dump(value, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def reader_offsets(journal: Path) -> dict[str, dict[str, int]]:
    """Returns, by query, the offset that it has committed: {node: next number}.

    Raises:
        JournalError: a report is damaged.
    """
    offsets = {}
    for path in sorted((journal / "readers").glob("[!.]*.json")):
        try:
            offset = json.loads(path.read_bytes())["offset"]
            offsets[path.stem] = {str(node): int(seq) for node, seq in offset.items()}
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise JournalError(f"{path} can't be read ({error!r}); `smqrt pipeline reset` removes it.") from None
    return offsets
