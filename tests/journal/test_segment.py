"""Segments: what is appended can be read at once, and a disk that takes nothing leaves nothing behind."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from smqrt.errors import JournalError
from smqrt.journal import segment
from smqrt.journal.reader import Journal
from tests.journal import written

REPOSITORY = Path(__file__).parents[2]


def test_index_records_have_64_bytes(tmp_path: Path) -> None:
    written.write(tmp_path, [[5, 9]])
    path = tmp_path / "wal/n1/00000000000000000000.idx"
    assert path.stat().st_size == 2 * segment.INDEX.size == 128
    first, second = segment.read_index(path)
    assert (first.first_seq, first.rows, second.first_seq, second.rows) == (0, 5, 5, 4)
    assert second.offset == first.end
    assert first.ts_min_us == written.START_US
    assert second.ts_max_us == written.START_US + 8000


def test_pyarrow_reads_the_file(tmp_path: Path) -> None:
    written.write(tmp_path, [[5, 64, 65]])
    with pa.memory_map(str(segment.paths(tmp_path / "wal/n1")[0])) as file:
        table = pa.ipc.open_stream(file).read_all()
        table.validate(full=True)
    assert table.column("seq").to_pylist() == list(range(65))
    assert table.schema.metadata == {b"node": b"n1", b"broker": b"hub-n1"}


def test_rows_are_visible_after_every_append(tmp_path: Path) -> None:
    opened = segment.SegmentFile.open(tmp_path / "wal/n1", 0, "n1", "hub")
    assert Journal(tmp_path).end() == {"n1": 0}
    for end in range(1, 20):
        written.append(opened, [written.row(end - 1)])
        assert Journal(tmp_path).end() == {"n1": end}
        assert list(Journal(tmp_path).rows({}, {"n1": end})) == written.rows(0, end)
        assert opened.size_bytes == opened.path.stat().st_size
    opened.close()


def test_what_is_long_synced_leaves_the_page_cache(tmp_path: Path) -> None:
    opened = segment.SegmentFile.open(tmp_path / "wal/n1", 0, "n1", "hub")
    for seq in range(64):
        written.append(opened, [written.row(seq)._replace(payload=b"x" * 65_000)])
    before = cached(opened.path)
    opened.sync(kept_bytes=2 << 20)
    after = cached(opened.path)
    opened.close()
    assert before.count(1) == len(before) > 1000
    assert after[:400].count(1) == 0
    assert after[-400:].count(1) == 400
    assert list(Journal(tmp_path).rows({}, {"n1": 64}))[5].payload == b"x" * 65_000


def cached(path: Path) -> bytes:
    """A byte per page of the file: 1 when it is in the page cache."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)  # writable, or ctypes does not tell its address
    resident = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), resident) == 0
    return bytes(page & 1 for page in resident)


def test_an_empty_segment_is_restarted(tmp_path: Path) -> None:
    folder = tmp_path / "wal/n1"
    segment.SegmentFile.open(folder, 7, "n1", "old").close()
    segment.SegmentFile.open(folder, 7, "n1", "new").close()
    assert [path.name for path in segment.paths(folder)] == ["00000000000000000007.arrows"]
    assert b"new" in segment.paths(folder)[0].read_bytes()


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "wal/n1"
    code = "import sys, pathlib, os; from smqrt.journal import segment; segment.lock(pathlib.Path(sys.argv[1]));"
    code += "print(os.getpid(), flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout
        pid = other.stdout.readline().strip()
        with pytest.raises(JournalError, match=rf"{folder} is written by process {pid}; stop it, or give this hub its"):
            segment.lock(folder)
        other.kill()
    segment.lock(folder)
    with pytest.raises(JournalError, match="is written by process"):
        segment.lock(folder)


def test_a_folder_that_can_not_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match="can't be used: Not a directory; choose another `journal.path`"):
        segment.lock(tmp_path / "file" / "n1")


FULL = """
import resource, sys
from pathlib import Path
from smqrt.journal import segment
from smqrt.journal.reader import Journal
from tests.journal import written

journal = Path(sys.argv[1])
opened = segment.SegmentFile.open(journal / "wal/n1", 0, "n1", "hub")
written.append(opened, written.rows(0, 50))
size = opened.size_bytes
for limit in range(size, size + 4000, 501):
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        written.append(opened, written.rows(50, 200))
    except OSError as error:
        print(error.strerror)
    assert opened.size_bytes == size == opened.path.stat().st_size
    assert len(segment.read_index(opened.path)) == 1
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
written.append(opened, written.rows(50, 200))
opened.sync()
opened.close()
assert list(Journal(journal).rows({}, {"n1": 200})) == written.rows(0, 200)
"""


def test_a_disk_that_takes_no_more(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["File too large"] * 8


FULL_INDEX = """
import os, resource, sys
from pathlib import Path
from smqrt.journal import segment
from tests.journal import written

opened = segment.SegmentFile.open(Path(sys.argv[1]) / "wal/n1", 0, "n1", "hub")
written.append(opened, written.rows(0, 5))
size, index = opened.size_bytes, opened.path.with_suffix(".idx")
os.truncate(index, 100_032)
opened._index_bytes = 100_032
sys.dont_write_bytecode = True
resource.setrlimit(resource.RLIMIT_FSIZE, (100_064, resource.RLIM_INFINITY))
try:
    written.append(opened, written.rows(5, 9))
except OSError as error:
    print(error.strerror)
assert opened.path.stat().st_size == size == opened.size_bytes
assert index.stat().st_size == 100_032
assert opened.next_seq == 5
"""


def test_an_index_that_takes_no_more(tmp_path: Path) -> None:
    """The batch fits, half of its index record does: neither stays."""
    done = subprocess.run(
        [sys.executable, "-c", FULL_INDEX, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        cwd=REPOSITORY,
    )
    assert (done.returncode, done.stdout) == (0, "File too large\n"), done.stderr


def test_what_a_failed_sync_was_about_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kernel that could not write it, the test takes it out of the files between the two syncs."""
    opened = segment.SegmentFile.open(tmp_path / "wal/n1", 0, "n1", "hub")
    written.append(opened, written.rows(0, 5))
    opened.sync()
    written.append(opened, written.rows(5, 9))
    path, indexed = opened.path, opened.path.with_suffix(".idx")
    as_it_was = indexed.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", failing)
        with pytest.raises(OSError, match="Input/output error"):
            opened.sync()
    assert opened.unsynced_rows == 4
    os.truncate(indexed, 64)
    assert opened.sync() == []
    assert indexed.read_bytes() == as_it_was
    assert (opened.unsynced_rows, opened.unsynced_bytes) == (0, 0)
    written.append(opened, written.rows(9, 12))
    opened.close()
    assert list(Journal(tmp_path).rows({}, {"n1": 12})) == written.rows(0, 12)
    assert path.stat().st_size == opened.size_bytes


def failing(fd: int) -> None:
    raise OSError(errno.EIO, "Input/output error")


# ---- reserved numbers


def write_numbers(folder: Path, text: str) -> Path:
    (folder / segment.NUMBERS_FILE).write_text(text)
    return folder


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"below": "7"}', '{"below": true}', '{"below": -1}', f'{{"below": {1 << 62}}}']
)
def test_a_damaged_reservation_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(JournalError, match=r"numbers\.json is damaged"):
        segment.reserved(write_numbers(tmp_path, text))


def test_a_reservation_is_a_number_below_2_to_62(tmp_path: Path) -> None:
    assert segment.reserved(tmp_path) == 0
    for below in (0, 7, (1 << 62) - 1):
        assert segment.reserved(write_numbers(tmp_path, f'{{"below": {below}}}')) == below


def test_gaps_of_a_damaged_file_are_unknown(tmp_path: Path) -> None:
    assert segment.gaps(tmp_path) == []
    for text in ("", "[]", "{}", '{"gaps": [1]}', '{"gaps": 3}', '{"gaps": [["a", 2]]}'):
        assert segment.gaps(write_numbers(tmp_path, text)) == []
    assert segment.gaps(write_numbers(tmp_path, '{"below": 9, "gaps": [[3, 8], [9, 20]]}')) == [(3, 8), (9, 20)]


def test_a_number_in_a_gap_becomes_the_next_row() -> None:
    known = [(3, 8), (9, 20)]
    assert [segment.skip_gap(seq, known) for seq in (2, 3, 7, 8, 9, 19, 20)] == [2, 8, 8, 8, 20, 20, 20]


def test_numbers_continue_at_multiples_of_a_step() -> None:
    step = segment.STEP
    assert step == 1 << 20
    assert [segment.next_step(seq) for seq in (0, 1, step, step + 1)] == [0, step, step, 2 * step]
    assert segment.is_gap(5, step)
    assert not segment.is_gap(5, step + 1)
    assert not segment.is_gap(step, step)
    assert not segment.is_gap(step + 1, step)
    assert segment.may_have_gap(5, step)
    assert not segment.may_have_gap(5, step - 1)
    assert not segment.may_have_gap(step, 2 * step - 1)


def test_a_reservation_is_extended_when_half_of_it_is_used(tmp_path: Path) -> None:
    folder = tmp_path / "wal" / "n1"
    folder.mkdir(parents=True)
    reserve = segment.NumberReserve(folder, 5)
    step = segment.STEP
    assert reserve.below == segment.reserved(folder) == 2 * step
    assert not reserve.is_short(2 * step - step // 2)
    assert reserve.is_short(2 * step - step // 2 + 1)
    sizes = []
    for _ in range(8):
        before = reserve.below
        reserve.extend(before)
        sizes.append((reserve.below - before) // step)
    assert sizes == [2, 4, 8, 16, 32, 64, 64, 64], "twice as many while they are used quickly"
    assert segment.reserved(folder) == reserve.below
    reserve.extend(5)
    assert segment.reserved(folder) == reserve.below >= before
    reserve.release(77)
    assert segment.reserved(folder) == 77
    reserve.repeat()
    assert segment.reserved(folder) == reserve.below


def test_gaps_that_meet_are_one(tmp_path: Path) -> None:
    folder = tmp_path / "wal" / "n1"
    folder.mkdir(parents=True)
    for next_seq, begins in ((5, 5), (10, 7), (20, 10), (30, 25), (30, 40)):
        segment.NumberReserve(folder, next_seq, begins)
    assert segment.gaps(folder) == [(7, 20), (25, 30)]


def test_only_the_newest_gaps_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "wal" / "n1"
    folder.mkdir(parents=True)
    many = [[at * 10, at * 10 + 5] for at in range(segment.MAX_GAPS)]
    write_numbers(folder, json.dumps({"below": 0, "gaps": many}))
    segment.NumberReserve(folder, 9000, 8000)
    found = segment.gaps(folder)
    assert (len(found), found[0], found[-1]) == (256, (10, 15), (8000, 9000))


# ---- index


def entry(first: int, rows: int, offset: int, length: int = 100, flags: int = 0) -> segment.BatchEntry:
    return segment.BatchEntry(first, rows, offset, length, first, first + rows, 7, flags)


def packed(*entries: segment.BatchEntry) -> bytes:
    return b"".join(segment.INDEX.pack(*one) for one in entries)


def test_a_partial_record_at_the_end_is_ignored() -> None:
    entries = [entry(0, 5, 8), entry(5, 2, 108)]
    data = packed(*entries)
    assert segment.parse_index(data) == segment.parse_index(data + bytes(63)) == entries
    assert segment.parse_index(data[:-1]) == entries[:1]
    assert segment.parse_index(memoryview(data)[:10]) == []


def test_times_are_at_their_place_in_a_record() -> None:
    record = packed(entry(3, 4, 8)._replace(ts_min_us=11, ts_max_us=22))
    assert segment.TIMES.unpack(record) == (11, 22)
    assert segment.TIMES.size == segment.INDEX.size


def test_only_batches_of_commits_are_found(tmp_path: Path) -> None:
    flags = [0, segment.HAS_TXN, segment.RESULTS, segment.HAS_TXN | segment.RESULTS]
    entries = [entry(at, 1, 8 + at * 100, flags=flag) for at, flag in enumerate(flags)]
    path = tmp_path / "00000000000000000000.arrows"
    assert segment.with_transactions(path) == []
    path.with_suffix(".idx").write_bytes(packed(*entries) + bytes(60))
    assert segment.with_transactions(path) == [entries[1], entries[3]]
    path.with_suffix(".idx").write_bytes(packed(entries[0], entries[2]))
    assert segment.with_transactions(path) == []


def test_ranges_of_results_are_joined() -> None:
    flags = [0, 1, 2, 0, 2, 3, 0]
    entries = [entry(at * 10, 10, 8 + at * 100, flags=flag) for at, flag in enumerate(flags)]
    assert segment.result_ranges(packed(*entries)) == [(10, 30), (40, 60)]
    assert segment.result_ranges(packed(entries[0])) == segment.result_ranges(b"") == []
    assert segment.result_ranges(packed(entries[1], entries[4])) == [(10, 20), (40, 50)]


@pytest.mark.parametrize(
    "wrong", [entry(6, 5, 108), entry(4, 5, 108), entry(5, 5, 109), entry(5, 5, 107), entry(5, 0, 108)]
)
def test_a_batch_that_does_not_follow_is_damage(wrong: segment.BatchEntry) -> None:
    right = entry(5, 1, 108)
    segment.check_index([entry(0, 5, 8), right], "x.arrows")
    with pytest.raises(JournalError, match=r"^a/x\.idx is damaged at offset 192: "):
        segment.check_index([entry(0, 5, 8), wrong], "a/x.arrows", 128)
    with pytest.raises(JournalError, match=r"^a/x\.idx is damaged at offset 64: "):
        segment.check_index([entry(0, 5, 8), wrong], "a/x.idx")


def test_names_of_segments_are_numbers(tmp_path: Path) -> None:
    assert segment.name(7) == "00000000000000000007"
    assert segment.first_seq("/j/wal/n1.5/00000000000000000007.arrows") == 7
    assert segment.first_seq(Path("00000000000000000012.idx")) == 12
    for name in ("00000000000000000012.arrows", "00000000000000000007.arrows", "x.arrows", "00000000000000000003.idx"):
        (tmp_path / name).touch()
    assert segment.firsts(tmp_path) == [7, 12]
    assert segment.paths(tmp_path / "x.arrows") == segment.paths(tmp_path / "nowhere") == []


def test_only_folders_are_nodes(tmp_path: Path) -> None:
    assert segment.node_folders(tmp_path) == []
    for node in ("n2", "n1"):
        (tmp_path / "wal" / node).mkdir(parents=True)
    (tmp_path / "wal" / "file").touch()
    assert segment.node_folders(tmp_path) == [tmp_path / "wal" / "n1", tmp_path / "wal" / "n2"]


def test_a_dense_segment_misses_no_number(tmp_path: Path) -> None:
    written.write(tmp_path, [[5, 9]])
    [path] = segment.paths(tmp_path / "wal" / "n1")
    found = segment.summary_of(path)
    assert found == (0, 9, 9, 2, written.START_US, written.START_US + 8000, 128)
    assert found.is_dense
    assert not found._replace(end=10).is_dense
    assert not found._replace(end=0, rows=0).is_dense
    segment.remove_summary(path)
    assert segment.known_summary(path) is None


# ---- writing


def test_what_is_not_synced_is_counted(tmp_path: Path) -> None:
    opened = segment.SegmentFile.open(tmp_path / "wal/n1", 3, "n1", "hub")
    assert (opened.unsynced_bytes, opened.unsynced_rows, opened.synced_seq, opened.next_seq) == (0, 0, 3, 3)
    written.append(opened, written.rows(3, 8))
    schema_bytes = segment.read_index(opened.path)[0].offset
    assert (opened.unsynced_rows, opened.synced_seq, opened.next_seq) == (5, 3, 8)
    assert opened.unsynced_bytes == opened.size_bytes > schema_bytes
    assert opened.sync() == []
    synced_bytes = opened.size_bytes
    assert (opened.unsynced_bytes, opened.unsynced_rows, opened.synced_seq) == (0, 0, 8)
    written.append(opened, written.rows(8, 10))
    assert opened.unsynced_bytes == opened.size_bytes - synced_bytes
    assert (opened.unsynced_rows, opened.synced_seq) == (2, 8)
    opened.close()
    opened.close()


def test_removed_files_are_restored_from_the_open_ones(tmp_path: Path) -> None:
    opened = segment.SegmentFile.open(tmp_path / "wal/n1", 0, "n1", "hub")
    written.append(opened, written.rows(0, 5))
    assert opened.is_present()
    for path in (opened.path, opened.path.with_suffix(".idx")):
        content = path.read_bytes()
        path.unlink()
        assert not opened.is_present()
        opened.restore()
        assert opened.is_present()
        assert path.read_bytes() == content
    opened.path.rename(tmp_path / "moved")
    opened.path.touch()
    assert not opened.is_present(), "another file is at its path"
    opened.restore()
    written.append(opened, written.rows(5, 9))
    opened.sync()
    opened.close()
    assert list(Journal(tmp_path).rows({}, {"n1": 9})) == written.rows(0, 9)


def test_a_batch_that_is_lost_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = segment.SegmentFile.open(tmp_path / "wal/n1", 0, "n1", "hub")
    for first, end in ((0, 5), (5, 9)):
        written.append(opened, written.rows(first, end))
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", failing)
        with pytest.raises(OSError, match="Input/output error"):
            opened.sync()
    with opened.path.open("r+b") as file:
        file.seek(segment.read_index(opened.path)[1].end - 1)
        file.write(b"\xff")
    assert [(one.first_seq, one.rows) for one in opened.sync()] == [(5, 4)]
    assert opened.sync() == []
    opened.close()


def test_a_segment_without_an_index_leaves_nothing_open(tmp_path: Path) -> None:
    (tmp_path / f"{segment.name(7)}.idx").mkdir()
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="directory"):
        segment.SegmentFile(tmp_path / f"{segment.name(7)}.arrows", 7, b"schema")
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize("failing_write", [1, 2])
def test_a_batch_that_is_not_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing_write: int
) -> None:
    opened = segment.SegmentFile.open(tmp_path / "wal/n1", 0, "n1", "hub")
    written.append(opened, written.rows(0, 5))
    index = opened.path.with_suffix(".idx")
    before, calls, real = (opened.path.read_bytes(), index.read_bytes()), [], os.pwritev

    def partly(fd: int, pieces: Any, offset: int) -> int:
        calls.append(fd)
        if len(calls) < failing_write:
            return real(fd, pieces, offset)
        real(fd, [b"".join(pieces)[:10]], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", partly)
        with pytest.raises(OSError, match="No space left"):
            written.append(opened, written.rows(5, 9))
    assert (opened.path.read_bytes(), index.read_bytes()) == before
    assert (opened.next_seq, opened.unsynced_rows) == (5, 5)
    written.append(opened, written.rows(5, 9))
    opened.close()
    assert list(Journal(tmp_path).rows({}, {"n1": 9})) == written.rows(0, 9)


def test_a_batch_is_written_in_pieces_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = segment.SegmentFile.open(tmp_path / "wal/n1", 0, "n1", "hub")
    real, whole = os.pwritev, os.pwrite
    monkeypatch.setattr(os, "pwritev", lambda fd, pieces, offset: real(fd, [b"".join(pieces)[:10]], offset))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: whole(fd, bytes(data)[:100], offset))
    for first, end in ((0, 5), (5, 9)):
        written.append(opened, written.rows(first, end))
    opened.close()
    assert list(Journal(tmp_path).rows({}, {"n1": 9})) == written.rows(0, 9)


def test_the_name_of_a_segment_is_synced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before that, a power failure may leave a folder without the segment."""
    synced: list[Path] = []
    monkeypatch.setattr(segment, "sync_folder", synced.append)
    opened = segment.SegmentFile.open(tmp_path / "wal/n1", 0, "n1", "hub")
    for seq in range(3):
        written.append(opened, [written.row(seq)])
        opened.sync()
    assert synced == [tmp_path / "wal/n1"]
    opened.restore()
    opened.sync()
    opened.close()
    assert synced == [tmp_path / "wal/n1"] * 2
