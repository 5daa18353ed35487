"""A damaged segment: what is whole stays where it is, under its number, and what isn't is named."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from smqrt import hub
from smqrt.errors import JournalError
from smqrt.journal import arrow, committed, recovery, segment
from smqrt.journal import segment as index
from smqrt.journal.reader import Journal
from smqrt.journal.record import Row
from smqrt.journal.verification import verify
from tests.journal import written
from tests.journal.written import BATCHES

END = BATCHES[-1]
ROWS = written.rows(0, END)
SEGMENT = "00000000000000000000.arrows"
NAMED = re.compile(r"rows (\d+) to (\d+) are damaged")

Damage = Callable[[random.Random, bytearray, bytearray], None]


def flip_data(random_: random.Random, data: bytearray, index: bytearray) -> None:
    data[random_.randrange(len(data))] ^= 1 << random_.randrange(8)


def flip_index(random_: random.Random, data: bytearray, index: bytearray) -> None:
    index[random_.randrange(len(index))] ^= 1 << random_.randrange(8)


def zero_data(random_: random.Random, data: bytearray, index: bytearray) -> None:
    """A sector is empty."""
    at = random_.randrange(len(data) - 512)
    data[at : at + 512] = bytes(512)


def zero_index(random_: random.Random, data: bytearray, index: bytearray) -> None:
    at, records = random_.randrange(len(BATCHES)), random_.randrange(1, 5)
    index[64 * at : 64 * (at + records)] = bytes(len(index[64 * at : 64 * (at + records)]))


def cut_data(random_: random.Random, data: bytearray, index: bytearray) -> None:
    del data[random_.randrange(len(data)) :]


def cut_index(random_: random.Random, data: bytearray, index: bytearray) -> None:
    del index[random_.randrange(1, len(index)) :]


def two(random_: random.Random, data: bytearray, index: bytearray) -> None:
    for damage in random_.choices(ONE, k=2):
        damage(random_, data, index)


ONE = [flip_data, flip_index, zero_data, zero_index]
DAMAGES = [*ONE, cut_data, cut_index, two]


def readable(journal: Path) -> dict[int, Row]:
    """Every row that can be read, by the number under which it is given."""
    found: dict[int, Row] = {}
    reader = Journal(journal)
    entries = [entry for path in index.paths(journal / "wal/n1") for entry in index.read_index(path)]
    while entries:
        at, end = entries[0].first_seq, entries[-1].next_seq
        with suppress(JournalError):
            for row in reader.rows({"n1": at}, {"n1": end}):
                assert row.seq == at
                found[at] = row
                at += 1
            assert at == end
        entries = [entry for entry in entries if entry.first_seq > at]  # behind the batch that can't be read
    return found


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_five_hundred_damages(damage: Damage, whole: tuple[bytes, bytes], memory: Path) -> None:
    """Over all kinds: no row comes under another number, no number is given again, and what is lost is told."""
    folder, random_ = memory / "wal/n1", random.Random(damage.__name__)
    folder.mkdir(parents=True)
    schema = arrow.schema_message("n1", "hub-n1")
    assert whole[0].startswith(schema)
    for _ in range(1 + 500 // len(DAMAGES)):
        data, index = map(bytearray, whole)
        damage(random_, data, index)
        for path in folder.iterdir():
            path.unlink()
        (folder / SEGMENT).write_bytes(data)
        (folder / SEGMENT).with_suffix(".idx").write_bytes(index)

        found = recovery.recover(folder, schema)
        again = recovery.recover(folder, schema)
        assert again == found._replace(removed_bytes=0, faults=again.faults), "a second time changes nothing"
        assert set(again.faults) == {one for one in found.faults if "its beginning" not in one}

        kept, end = readable(memory), found.next_seq
        assert all(row == ROWS[seq] for seq, row in kept.items())
        named = {
            seq
            for one in found.faults
            for first, last in NAMED.findall(one)
            for seq in range(int(first), int(last) + 1)
        }
        lost = set(range(END)) - kept.keys()
        assert max(kept, default=-1) < end
        assert {seq for seq in lost if seq < end} == named
        assert end == END or found.removed_bytes, "what is cut off is told"
        if named:
            assert verify(memory).faults
        written.write(memory, [[end + 5]], first=end)
        after = readable(memory)
        assert {seq: row for seq, row in after.items() if seq < end} == kept
        assert [seq for seq in after if seq >= end] == list(range(end, end + 5))


def damaged(whole: tuple[bytes, bytes], path: Path, at: int) -> None:
    path.parent.mkdir(parents=True)
    data = bytearray(whole[0])
    data[at] ^= 1
    path.write_bytes(data)
    path.with_suffix(".idx").write_bytes(whole[1])


def test_a_flip_loses_its_own_batch_only(whole: tuple[bytes, bytes], tmp_path: Path) -> None:
    path = tmp_path / "wal/n1" / SEGMENT
    damaged(whole, path, index.parse_index(whole[1])[3].offset + 1500)
    found = recovery.recover(path.parent)
    assert (found.next_seq, found.removed_bytes) == (END, 0)
    assert list(readable(tmp_path)) == [*range(20), *range(31, END)]
    [told] = found.faults
    assert told.startswith(f"{path}: rows 20 to 30 are damaged, but the rows after them are valid; ")
    [fault] = verify(tmp_path).faults
    assert "the batch with rows 20 to 30 at offset" in str(fault)
    assert not fault.torn


def test_a_hub_starts_with_a_damaged_journal_and_reports(
    whole: tuple[bytes, bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damaged(whole, tmp_path / "wal/n1" / SEGMENT, index.parse_index(whole[1])[0].end - 20)
    smq = hub.create(journal=str(tmp_path))
    assert smq.journal.stats()["next_seq"] == END
    assert "rows 0 to 6 are damaged, but the rows after them are valid" in caplog.text
    smq.journal.close()


def test_a_damaged_schema_is_repaired(whole: tuple[bytes, bytes], tmp_path: Path) -> None:
    path = tmp_path / "wal/n1" / SEGMENT
    damaged(whole, path, 1)
    found = recovery.recover(path.parent, arrow.schema_message("n1", "hub-n1"))
    assert (found.next_seq, found.removed_bytes) == (END, 0)
    assert path.read_bytes() == whole[0]


def test_a_hub_starts_despite_commits_in_damaged_batches(tmp_path: Path) -> None:
    folder = tmp_path / "wal/n1"
    opened = segment.SegmentFile.open(folder, 0, "n1", "hub")
    for batch in range(4):
        written.append(opened, written.rows(batch, batch + 1, f"q:{batch}"))
    opened.close()
    data = bytearray(opened.path.read_bytes())
    data[index.read_index(opened.path)[1].offset + 1300] ^= 1
    opened.path.write_bytes(data)
    assert recovery.recover(folder).txns == {"q": 3}
    assert committed.last_batches(tmp_path) == {"q": 3}
