"""After a crash the journal ends at its last whole batch, and goes on from there."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from smqrt.errors import JournalError
from smqrt.journal import arrow, committed, manifest, recovery, segment
from smqrt.journal import segment as index
from smqrt.journal.reader import Journal
from smqrt.journal.segment import parse_index
from tests.journal import written
from tests.journal.written import BATCHES

REPOSITORY = Path(__file__).parents[2]
ROWS = written.rows(0, BATCHES[-1])
SEGMENT = "00000000000000000000.arrows"
TAIL_BATCHES = 4

Damage = Callable[[random.Random, bytearray, bytearray], int]
"""Damages a segment and its index; returns how many batches are whole."""


def cut_data(random_: random.Random, data: bytearray, index: bytearray) -> int:
    entries = parse_index(index)
    size = random_.randrange(entries[-TAIL_BATCHES].offset, len(data))
    del data[size:]
    return sum(entry.end <= size for entry in entries)


def cut_index(random_: random.Random, data: bytearray, index: bytearray) -> int:
    size = random_.randrange(len(index) - 64 * TAIL_BATCHES, len(index))
    del index[size:]
    return size // 64


def flip_last(random_: random.Random, data: bytearray, index: bytearray) -> int:
    """Flips bits of the last batch: nobody can tell that from a batch that was being written."""
    at = random_.randrange(parse_index(index)[-1].offset, len(data))
    data[at : at + 16] = (byte ^ 1 << random_.randrange(8) for byte in data[at : at + 16])
    return len(BATCHES) - 1


def flip_last_index(random_: random.Random, data: bytearray, index: bytearray) -> int:
    """Flips a byte of what says where the last batch is, which rows it has, or its checksum."""
    index[64 * (len(BATCHES) - 1) + random_.choice([*range(32), *range(48, 52)])] ^= 1 << random_.randrange(8)
    return len(BATCHES) - 1


def garbage(random_: random.Random, data: bytearray, index: bytearray) -> int:
    """Something was added to both, as by a file system that had only the sizes."""
    data += random_.randbytes(random_.randrange(1, 3000))
    index += bytes(64) if random_.random() < 0.5 else random_.randbytes(random_.randrange(1, 200))
    return len(BATCHES)


DAMAGES = [cut_data, cut_index, flip_last, flip_last_index, garbage]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_five_hundred_torn_tails(damage: Damage, whole: tuple[bytes, bytes], memory: Path) -> None:
    """Five hundred over all kinds: each ends at its last whole batch, and goes on."""
    folder = memory / "wal/n1"
    folder.mkdir(parents=True)
    random_ = random.Random(damage.__name__)
    for _ in range(500 // len(DAMAGES)):
        data, index = map(bytearray, whole)
        good = damage(random_, data, index)
        (folder / SEGMENT).write_bytes(data)
        (folder / SEGMENT).with_suffix(".idx").write_bytes(index)
        end = BATCHES[good - 1]

        found = recovery.recover(folder)

        sizes = (folder / SEGMENT).stat().st_size, (folder / SEGMENT).with_suffix(".idx").stat().st_size
        assert found.next_seq == end
        assert found.removed_bytes == len(data) + len(index) - sum(sizes)
        assert whole[0].startswith((folder / SEGMENT).read_bytes())
        assert list(Journal(memory).rows({}, {"n1": end})) == ROWS[:end]
        assert recovery.recover(folder)[:4] == (end, 0, {}, ())


@pytest.mark.parametrize("field", range(32, 64), ids=str)
def test_what_no_checksum_covers_is_corrected(field: int, whole: tuple[bytes, bytes], tmp_path: Path) -> None:
    if 48 <= field < 52:
        return
    folder = tmp_path / "wal/n1"
    folder.mkdir(parents=True)
    index = bytearray(whole[1])
    index[64 * 5 + field] ^= 0x81
    (folder / SEGMENT).write_bytes(whole[0])
    (folder / SEGMENT).with_suffix(".idx").write_bytes(index)
    assert recovery.recover(folder)[:4] == (BATCHES[-1], 0, {}, ())
    assert (folder / SEGMENT).with_suffix(".idx").read_bytes() == whole[1]


def test_a_journal_goes_on_after_a_torn_tail(tmp_path: Path) -> None:
    written.write(tmp_path, [BATCHES])
    folder = tmp_path / "wal/n1"
    os.truncate(folder / SEGMENT, (folder / SEGMENT).stat().st_size - 1)
    start = recovery.recover(folder).next_seq
    assert start == BATCHES[-2]
    written.write(tmp_path, [[start + 5, start + 9]], first=start)
    assert list(Journal(tmp_path).rows({}, {"n1": start + 9})) == written.rows(0, start + 9)
    assert recovery.recover(folder).next_seq == start + 9


@pytest.mark.parametrize("left", [None, 0, 63])
def test_an_index_that_is_lost_is_made_again(tmp_path: Path, left: int | None) -> None:
    end = written.write(tmp_path, [[3, 8, 20]])
    (path,) = index.paths(tmp_path / "wal/n1")
    indexed = path.with_suffix(".idx")
    as_it_was = indexed.read_bytes()
    if left is None:
        indexed.unlink()
    else:
        os.truncate(indexed, left)
    with path.open("ab") as file:
        file.write(b"".join(arrow.encode(written.rows(20, 30)))[:-50])  # what was being written
    assert recovery.recover(tmp_path / "wal/n1").next_seq == end == 20
    assert indexed.read_bytes() == as_it_was
    assert list(Journal(tmp_path).rows({}, {"n1": 20})) == written.rows(0, 20)


def test_nothing_at_all(tmp_path: Path) -> None:
    assert recovery.recover(tmp_path / "wal/n1")[:4] == (0, 0, {}, ())


@pytest.mark.parametrize("left", [0, 1, 8, 100])
def test_a_segment_with_a_torn_schema(tmp_path: Path, left: int) -> None:
    written.write(tmp_path, [[5], []])
    newest = index.paths(tmp_path / "wal/n1")[-1]
    os.truncate(newest, left)
    newest.with_suffix(".idx").unlink()
    assert recovery.recover(newest.parent).next_seq == 5
    written.write(tmp_path, [[9]], first=5)
    assert list(Journal(tmp_path).rows({}, {"n1": 9})) == written.rows(0, 9)


def test_the_segment_before_the_newest_may_be_torn_too(tmp_path: Path) -> None:
    """Power failed before the sealed one was on the disk."""
    written.write(tmp_path, [[5, 9], [12]])
    before = index.paths(tmp_path / "wal/n1")[0]
    os.truncate(before, before.stat().st_size - 3)
    assert recovery.recover(before.parent).next_seq == 12
    assert [row.seq for row in Journal(tmp_path).rows({}, {"n1": 12})] == [*range(5), *range(9, 12)]


def test_numbers_go_on_behind_what_is_compacted(tmp_path: Path) -> None:
    written.write(tmp_path, [[5], [9]])
    written.to_parquet(tmp_path, [9])
    written.drop_compacted(tmp_path)
    assert recovery.recover(tmp_path / "wal/n1").next_seq == 9


def test_numbers_seen_by_a_pipeline_are_not_reused(tmp_path: Path) -> None:
    written.write(tmp_path, [[5]])
    (tmp_path / "readers").mkdir()
    report = {"query": "q", "name": "hot", "offset": {"n1": 17, "n2": 99}, "time_us": 0}
    (tmp_path / "readers" / "q.json").write_text(json.dumps(report))
    assert recovery.recover(tmp_path / "wal/n1").next_seq == segment.STEP, "a gap ends with a multiple of it"


def test_commits_are_found_in_the_snapshot_and_behind_it(tmp_path: Path) -> None:
    folder = tmp_path / "wal/n1"
    opened = segment.SegmentFile.open(folder, 0, "n1", "hub")
    manifest.write_json(folder / committed.COMMITS_FILE, {"old": 41, "q": 1})
    written.append(opened, written.rows(0, 4, "q:2"))
    written.append(opened, written.rows(4, 6))
    written.append(opened, [*written.rows(6, 7, "a:b:7"), *written.rows(7, 9)])
    written.append(opened, written.rows(9, 11, "q:3"))
    opened.close()
    assert recovery.recover(folder).txns == {"old": 41, "q": 3, "a:b": 7}
    os.truncate(opened.path, opened.path.stat().st_size - 1)
    assert recovery.recover(folder).txns == {"old": 41, "q": 2, "a:b": 7}
    (tmp_path / "wal/n1" / committed.COMMITS_FILE).unlink()
    assert recovery.recover(folder).txns == {"q": 2, "a:b": 7}


@pytest.mark.parametrize("known", [{}])
def test_commits_are_found_in_segments_without_a_snapshot(tmp_path: Path, known: dict[str, int]) -> None:
    folder = tmp_path / "wal/n1"
    for number in range(5):
        opened = segment.SegmentFile.open(folder, number, "n1", "hub")
        written.append(opened, written.rows(number, number + 1, f"q{number}:{number}"))
        opened.close()
    assert recovery.recover(folder).txns == known | {f"q{number}": number for number in range(5)}


def test_commits_behind_a_snapshot_that_could_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "wal/n1").mkdir(parents=True)
    manifest.write_json(tmp_path / "wal/n1" / committed.COMMITS_FILE, {"old": 1, "q0": 0})
    os.utime(tmp_path / "wal/n1" / committed.COMMITS_FILE, (1, 1))
    test_commits_are_found_in_segments_without_a_snapshot(tmp_path, {"old": 1})


def test_a_snapshot_that_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "wal/n1" / committed.COMMITS_FILE
    path.parent.mkdir(parents=True)
    path.write_text("[3]")
    with pytest.raises(JournalError, match=rf"{path} is damaged .*; remove it"):
        recovery.recover(tmp_path / "wal/n1")


ENDLESS = """
import sys
from pathlib import Path
from smqrt.journal import recovery, segment
from tests.journal import written

folder = Path(sys.argv[1]) / "wal/n1"
held = segment.lock(folder)
at = recovery.recover(folder).next_seq
opened = segment.SegmentFile.open(folder, at, "n1", "hub")
while True:
    end = at + 1 + at % 50
    written.append(opened, written.rows(at, end))
    at = end
    if opened.size_bytes > 50_000:
        opened.close()
        opened = segment.SegmentFile.open(folder, at, "n1", "hub")
    print(at, flush=True)
"""


def test_kill_9(tmp_path: Path) -> None:
    """What a killed writer had appended is there, in one sequence over all its lives."""
    random_, told = random.Random(3), 0
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", ENDLESS, str(tmp_path)], stdout=subprocess.PIPE, cwd=REPOSITORY
        ) as writer:
            assert writer.stdout
            told = int(writer.stdout.readline())
            time.sleep(random_.uniform(0.01, 0.08))
            writer.send_signal(signal.SIGKILL)
            told = int(([told, *writer.stdout.read().split(b"\n")[:-1]])[-1])
        end = recovery.recover(tmp_path / "wal/n1").next_seq
        assert end >= told
        assert list(Journal(tmp_path).rows({}, {"n1": end})) == written.rows(0, end)


# ---- what is repaired


def test_a_segment_is_read_with_and_without_its_index(whole: tuple[bytes, bytes], tmp_path: Path) -> None:
    path = tmp_path / SEGMENT
    path.write_bytes(whole[0])
    path.with_suffix(".idx").write_bytes(whole[1])
    entries = parse_index(whole[1])
    expected = recovery.Salvaged(entries, [], len(whole[0]), entries[0].offset)
    assert recovery.salvage(path) == expected
    path.with_suffix(".idx").unlink()
    assert recovery.salvage(path) == expected
    path.write_bytes(whole[0] + b"more")
    assert recovery.salvage(path) == expected
    path.write_bytes(whole[0][: entries[2].end - 1])
    assert recovery.salvage(path) == recovery.Salvaged(entries[:2], [], entries[1].end, entries[0].offset)


def test_a_damaged_batch_stays_between_valid_ones(whole: tuple[bytes, bytes], tmp_path: Path) -> None:
    folder = tmp_path / "wal/n1"
    folder.mkdir(parents=True)
    entries, data = parse_index(whole[1]), bytearray(whole[0])
    data[entries[3].end - 20] ^= 1
    (folder / SEGMENT).write_bytes(data)
    (folder / SEGMENT).with_suffix(".idx").write_bytes(whole[1])
    found = recovery.salvage(folder / SEGMENT)
    assert [(one.first_seq, one.rows, one.offset, one.length) for one in found.damaged] == [entries[3][:4]]
    assert [one[:4] for one in found.entries] == [one[:4] for one in entries]
    recovered = recovery.recover(folder)
    assert (recovered.next_seq, recovered.end, recovered.removed_bytes) == (BATCHES[-1], BATCHES[-1], 0)
    [sentence] = recovered.faults
    assert f"rows {entries[3].first_seq} to {entries[3].next_seq - 1} are damaged" in sentence
    assert (folder / SEGMENT).read_bytes() == data


def test_a_damaged_index_is_kept_beside_the_corrected_one(whole: tuple[bytes, bytes], tmp_path: Path) -> None:
    folder = tmp_path / "wal/n1"
    folder.mkdir(parents=True)
    entries, data, index = parse_index(whole[1]), bytearray(whole[0]), bytearray(whole[1])
    data[entries[3].end - 20] ^= 1
    index[-64 + 32] ^= 1
    (folder / SEGMENT).write_bytes(data)
    (folder / SEGMENT).with_suffix(".idx").write_bytes(index)
    recovery.recover(folder)
    assert (folder / f"{SEGMENT[:-7]}.idx.damaged").read_bytes() == index
    assert (folder / SEGMENT).with_suffix(".idx").read_bytes()[-64:] == whole[1][-64:]


def test_empty_segments_at_the_end_are_removed(tmp_path: Path) -> None:
    written.write(tmp_path, [[5], [9]])
    folder = tmp_path / "wal/n1"
    for first in (9, 10, 11):
        segment.SegmentFile.open(folder, first, "n1", "hub").close()
    recovery.remove_empty(folder, 11)
    assert index.firsts(folder) == [0, 5, 11]
    recovery.remove_empty(folder, 5)
    assert index.firsts(folder) == [0, 5]
    assert sorted(path.suffix for path in folder.iterdir()) == [".arrows"] * 2 + [".idx"] * 2


def test_a_beginning_that_is_nearly_right_is_known(tmp_path: Path) -> None:
    path, schema = tmp_path / "x", bytes(range(1, 101))
    for differing, is_right in ((0, True), (16, True), (17, False)):
        changed = bytearray(schema)
        changed[:differing] = bytes([200]) * differing
        changed[50:60] = bytes(10)
        path.write_bytes(bytes(changed) + b"batches")
        assert recovery.almost_begins_with(path, schema, 100) is is_right
        assert not recovery.almost_begins_with(path, schema, 99)


def test_a_lost_reservation_skips_far_ahead(tmp_path: Path) -> None:
    written.write(tmp_path, [[5]])
    (tmp_path / "wal/n1" / segment.NUMBERS_FILE).write_text("x")
    found = recovery.recover(tmp_path / "wal/n1")
    assert (found.next_seq, found.end) == (segment.next_step(5 + segment.MAX_LOST_ROWS), 5)
    assert len(found.faults) == 1
    (tmp_path / "wal/n1" / segment.NUMBERS_FILE).write_text('{"below": 5}')
    assert recovery.recover(tmp_path / "wal/n1").next_seq == 5
    (tmp_path / "wal/n1" / segment.NUMBERS_FILE).write_text('{"below": 6}')
    assert recovery.recover(tmp_path / "wal/n1").next_seq == segment.STEP


def test_an_unreadable_first_batch_gets_the_times_after_it(whole: tuple[bytes, bytes], tmp_path: Path) -> None:
    folder = tmp_path / "wal/n1"
    folder.mkdir(parents=True)
    entries, data = parse_index(whole[1]), bytearray(whole[0])
    data[entries[0].offset : entries[0].end] = b"\xff" * entries[0].length
    (folder / SEGMENT).write_bytes(data)
    (folder / SEGMENT).with_suffix(".idx").write_bytes(bytes(64) + whole[1][64:])
    found = recovery.salvage(folder / SEGMENT)
    [damaged] = found.damaged
    assert damaged[:4] == entries[0][:4]
    assert (damaged.ts_min_us, damaged.ts_max_us) == (entries[1].ts_min_us, entries[1].ts_max_us)
    assert (damaged.flags, damaged.reserved) == (0, 0)
    assert found.entries[1:] == entries[1:]
