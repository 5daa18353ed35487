"""Segments: what is appended can be read at once, and a disk that takes nothing leaves nothing behind."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
import sys
from pathlib import Path

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
