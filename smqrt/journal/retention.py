"""What may go: rows that are old enough, or too many; but not what a pipeline has yet to read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from smqrt.errors import JournalError
from smqrt.journal import index, manifest
from smqrt.journal.index import DATA, INDEXED
from smqrt.journal.settings import JournalSettings


class _Piece(NamedTuple):
    """A segment or a Parquet file: what goes together, and goes as a whole."""

    paths: tuple[Path, ...]
    node: str
    end: int
    ts_max_us: int
    size_bytes: int


def expired(journal: Path, settings: JournalSettings, now_us: int) -> list[Path]:
    """Returns the files that may be removed, oldest first; give them to `remove`.

    Segments and Parquet files go when all their rows are older than `retain_s`, and the oldest while all together are
    longer than `max_bytes`. Rows that a pipeline has yet to read stay, unless all are longer than `hard_bytes`. The
    newest segment of a node stays in any case.

    Args:
        journal: its folder.
        settings: `retain_s`, `max_bytes` and `hard_bytes` count.
        now_us: the time, microseconds since 1970.

    Raises:
        JournalError: the manifest or what a pipeline has said can't be read.
    """
    try:
        pieces = sorted(_in_turn(_pieces(journal)), key=lambda piece: piece.ts_max_us)
    except OSError as error:
        raise JournalError(f"{journal} can't be looked through: {error}.") from None
    needed, total = _needed(journal), sum(piece.size_bytes for piece in pieces) + _newest_bytes(journal)
    found: list[Path] = []
    for piece in pieces:  # of a node none goes after one that stays: its rows have no holes
        if _goes(piece, settings, now_us, total, needed):
            total -= piece.size_bytes
            found += piece.paths
    return found


def _goes(piece: _Piece, settings: JournalSettings, now_us: int, total: int, needed: dict[str, int]) -> bool:
    """Says whether a piece goes, while all that is left is `total` bytes long."""
    if settings.hard_bytes is not None and total > settings.hard_bytes:
        return True
    if piece.end > needed.get(piece.node, piece.end):
        return False
    old = settings.retain_s is not None and piece.ts_max_us < now_us - int(settings.retain_s * 1e6)
    return old or (settings.max_bytes is not None and total > settings.max_bytes)


def _needed(journal: Path) -> dict[str, int]:
    """Returns, by node, the number of the first row that a pipeline has yet to read."""
    needed: dict[str, int] = {}
    for offset in manifest.reader_offsets(journal).values():
        for node, seq in offset.items():
            needed[node] = min(seq, needed.get(node, seq))
    return needed


def _in_turn(pieces: Iterable[_Piece]) -> Iterator[_Piece]:
    """Yields the pieces in the order of their rows, none older than one before it, though a clock went back."""
    latest_us: dict[str, int] = {}
    for piece in sorted(pieces, key=lambda piece: piece.end):
        latest_us[piece.node] = max(piece.ts_max_us, latest_us.get(piece.node, 0))
        yield piece._replace(ts_max_us=latest_us[piece.node])


def _pieces(journal: Path) -> Iterator[_Piece]:
    for file in manifest.load(journal).files:
        yield _Piece((journal / file.path,), file.node, file.last + 1, file.ts_max_us, file.bytes)
    for folder in _nodes(journal):
        for path in index.paths(folder)[:-1]:
            if piece := _segment(path):
                yield piece


def _segment(path: Path) -> _Piece | None:
    """Returns a sealed segment; None when it has just gone."""
    indexed = path.with_suffix(INDEXED)
    try:
        size = path.stat().st_size + indexed.stat().st_size
    except FileNotFoundError:
        return None
    entries = index.read_index(path)
    end = entries[-1].next_seq if entries else index.first_seq(path)
    latest_us = max((entry.ts_max_us for entry in entries), default=0)
    return _Piece((path, indexed), path.parent.name, end, latest_us, size)


def _newest_bytes(journal: Path) -> int:
    newest = [path for folder in _nodes(journal) for path in index.paths(folder)[-1:]]
    files = [file for path in newest for file in (path, path.with_suffix(INDEXED)) if file.exists()]
    return sum(file.stat().st_size for file in files)


def _nodes(journal: Path) -> list[Path]:
    return sorted(path for path in (journal / "wal").glob("*") if path.is_dir())


def remove(journal: Path, paths: Iterable[Path]) -> int:
    """Removes files of a journal; Parquet files go from the manifest first, so that no reader looks for them.

    Args:
        journal: its folder.
        paths: of `expired`.

    Returns:
        How many bytes that gave back.

    Raises:
        JournalError: a file can't be removed.
    """
    files = list(paths)
    listed = {path.relative_to(journal).as_posix() for path in files if path.suffix not in (DATA, INDEXED)}
    if listed:
        with manifest.edit(journal) as known:
            known.files[:] = [file for file in known.files if file.path not in listed]
    freed = 0
    for path in files:
        try:
            size = path.stat().st_size
            path.unlink()
            freed += size
        except FileNotFoundError:
            continue
        except OSError as error:
            raise JournalError(f"{path} can't be removed: {error.strerror}; give this user the folder.") from None
    return freed
