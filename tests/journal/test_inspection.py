"""Rows of a journal: the last ones, by time, as text and as JSON, and moments as people write them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from smqrt.errors import ArgumentError
from smqrt.journal import compact, inspection
from smqrt.journal.inspection import RecordedRow, as_fields, as_line
from smqrt.journal.reader import Journal
from smqrt.journal.record import iso, parse_moment
from tests.journal.sensor_rows import NOON_US, readings, row, write


def seqs(found: list[RecordedRow]) -> list[tuple[str, int]]:
    return [(recorded.node, recorded.row.seq) for recorded in found]


@pytest.mark.parametrize("compacted", [False, True])
def test_the_last_rows(tmp_path: Path, compacted: bool) -> None:
    write(tmp_path, readings(8000), segment_rows=2000)
    write(tmp_path, [row(8000, NOON_US + 8_000_000_000, "other")])
    if compacted:
        compact.compact(tmp_path, compact.CompactOptions(grace_s=0))
    journal = Journal(tmp_path)
    end = journal.end()
    assert seqs(inspection.latest(journal, end, 3)) == [("n1", 7998), ("n1", 7999), ("n1", 8000)]
    assert inspection.latest(journal, end, 0) == []
    assert len(inspection.latest(journal, end, 50_000)) == 8001
    rare = [recorded.row.topic for recorded in inspection.latest(journal, end, 2, ["site1/5/+"])]
    assert rare == ["site1/5/temp"] * 2
    assert inspection.latest(journal, end, 2, ["nobody"]) == []


def test_what_is_rare_is_found_far_back(tmp_path: Path) -> None:
    rare = (100, 101, 9_000, 19_000)
    rows = [row(seq, NOON_US + seq, "rare" if seq in rare else "often") for seq in range(20_000)]
    write(tmp_path, rows, batch=500, segment_rows=5_000)
    journal = Journal(tmp_path)
    for count in range(1, 5):
        found = inspection.latest(journal, journal.end(), count, ["rare"])
        assert [recorded.row.seq for recorded in found] == list(rare[-count:])


def test_rows_of_several_nodes_are_ordered_by_time(tmp_path: Path) -> None:
    write(tmp_path, [row(seq, NOON_US + 10 * seq) for seq in range(4)])
    write(tmp_path, [row(seq, NOON_US + 10 * seq + 5) for seq in range(4)], node="n2")
    journal = Journal(tmp_path)
    found = list(inspection.in_order(journal, {}, journal.end()))
    assert seqs(found) == [(node, seq) for seq in range(4) for node in ("n1", "n2")]
    assert seqs(inspection.latest(journal, journal.end(), 3)) == [("n2", 2), ("n1", 3), ("n2", 3)]
    assert seqs(list(inspection.in_order(journal, {"n1": 3, "n2": 4}, journal.end()))) == [("n1", 3)]


def test_what_is_written_is_followed(tmp_path: Path) -> None:
    write(tmp_path, readings(10))
    journal = Journal(tmp_path)
    following: Iterator[RecordedRow] = inspection.follow(journal, journal.end())
    thread = threading.Timer(0.3, lambda: write(tmp_path, readings(5, first=10)))
    thread.start()
    assert [recorded.row.seq for recorded in islice(following, 5)] == list(range(10, 15))
    thread.join()


def test_lines_are_readable() -> None:
    line = as_line(RecordedRow("n1", row(1, NOON_US, "a/b", b"hello \xc3\xb6")))
    assert line == "2026-11-20T12:00:00.000000Z  a/b  sensor  hello ö"
    direct = row(1, NOON_US + 1, None, b"\xff\x00", subtopic="s", uid=None, flags=1 | 2 | 4 | 8 | 16)
    flags = "[direct]  [unrouted]  [assembled]  [pipeline]  [server]"
    assert as_line(RecordedRow("n1", direct)) == f"2026-11-20T12:00:00.000001Z  (to 4711) (s)  -  0xff00  {flags}"
    assert as_line(RecordedRow("n1", row(1, payload=b"two\nlines\x1b[31m"))).endswith(r'"two\nlines\u001b[31m"')


def test_json_has_everything() -> None:
    fields = as_fields(RecordedRow("n1", row(7, NOON_US, "a", b"{}", txn="q:1", flags=8)))
    assert fields == {
        "node": "n1", "seq": 7, "ts": "2026-11-20T12:00:00.000000Z", "topic": "a", "tid": 4711, "subtopic": None,
        "stid": None, "ptid": 99, "uid": "sensor", "flags": ["pipeline"], "txn": "q:1", "payload": "{}",
        "qos": None, "retain": None, "properties": None,
    }  # fmt: skip
    of_mqtt = row(7)._replace(qos=1, retain=True, properties='{"unit":"C"}')
    found = as_fields(RecordedRow("n1", of_mqtt))
    assert (found["qos"], found["retain"], found["properties"]) == (1, True, {"unit": "C"})
    assert as_line(RecordedRow("n1", of_mqtt)).endswith("  [qos 1]  [retain]")
    assert "qos" not in as_line(RecordedRow("n1", row(7)._replace(qos=0, retain=False, properties="{}")))
    assert as_fields(RecordedRow("n1", row(7, payload=b"\xff")))["payload_hex"] == "ff"


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2h", NOON_US - 7_200_000_000),
        ("90s", NOON_US - 90_000_000),
        ("2026-11-20", NOON_US - 43_200_000_000),
        ("2026-11-20T12:00:00.000001", NOON_US + 1),
        ("2026-11-20T13:00+01:00", NOON_US),
        ("2026-11-20 12:00Z", NOON_US),
        ("earliest", 0),
        ("latest", NOON_US),
    ],
)
def test_moments(text: str, moment: int) -> None:
    assert parse_moment(text, now=NOON_US) == moment


def test_what_is_no_moment() -> None:
    with pytest.raises(ArgumentError, match="--from 'yesterday' must be a duration such as 2h"):
        parse_moment("yesterday", "--from")


def test_times_are_written_as_they_are_read() -> None:
    for ts_us in (0, 1, NOON_US, NOON_US + 999_999):
        assert parse_moment(iso(ts_us)) == ts_us
