"""Readers of a journal: their reports, their backlogs without results of pipelines, and which of them are stale."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from smqrt.errors import ArgumentError, JournalError
from smqrt.journal import commit, files, readers, recovery, segment, writer
from smqrt.journal.arrow import schema_message
from smqrt.journal.inspection import journal_stats
from smqrt.journal.reader import Journal
from smqrt.journal.readers import Backlog, Reader, ResultRows, parse_report, save_report
from smqrt.journal.record import Flag
from smqrt.journal.segment import STEP
from smqrt.pipeline.runner import lag_rows, lag_seconds
from tests.journal import written
from tests.journal.test_retention import DAY_S, KEEP, SECOND_US, report, silent
from tests.support.device import Site


def write(journal: Path, kinds: str, first: int = 0, rows: int = 4, told: bool = True, node: str = "n1") -> list[int]:
    """Writes a segment of batches: "r" of results, "m" of messages, "x" of both; returns the numbers of messages."""
    opened, messages = segment.SegmentFile.open(journal / "wal" / node, first, node, "hub"), []
    for number, kind in enumerate(kinds):
        begin = first + number * rows
        is_result = [kind == "r" or (kind == "x" and seq % 2 == 0) for seq in range(begin, begin + rows)]
        batch = [
            one._replace(flags=int(Flag.PIPELINE) if result else 0)
            for one, result in zip(written.rows(begin, begin + rows), is_result, strict=True)
        ]
        messages += [one.seq for one, result in zip(batch, is_result, strict=True) if not result]
        written.append(opened, batch, segment.RESULTS if told and kind == "r" else 0)
    opened.close()
    return messages


def test_every_range_against_a_plain_count(tmp_path: Path) -> None:
    chance = random.Random(5)
    messages, at = [], 0
    for told in (True, False, True):
        kinds = "".join(chance.choice("rrmx") for _ in range(12))
        messages += write(tmp_path, kinds, at, told=told)
        at += len(kinds) * 4
    messages += write(tmp_path, "rrmr", STEP)
    end = STEP + 16
    journal = Journal(tmp_path)
    for _ in range(60):
        last = chance.choice([chance.randint(1, at), end])
        first = chance.randint(0, min(last, at))
        wanted = [seq for seq in messages if first <= seq < last]
        found = ResultRows(journal, {"n1": last})
        assert found.count_other_rows({"n1": last - 1}) == sum(seq == last - 1 for seq in messages)
        assert found.count_other_rows({"n1": first}) == len(wanted), "also when an earlier row is asked for later"
        assert found.first_other_rows({"n1": first}) == ({"n1": wanted[0]} if wanted else {})


def test_rows_excluded_by_the_index_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "r" * 500 + "m", rows=20)
    monkeypatch.setattr(readers, "MAX_READ", 0)
    monkeypatch.setattr(Journal, "tables", None)
    journal = Journal(tmp_path)
    assert ResultRows(journal, {"n1": 10_000}, 0).count_other_rows({"n1": 3}) == 0
    assert ResultRows(journal, {"n1": 10_020}, 0).count_other_rows({"n1": 3}) == 20


def test_of_many_rows_without_an_index_all_count(tmp_path: Path) -> None:
    write(tmp_path, "rrr", rows=100, told=False)
    end = {"n1": 300}
    assert ResultRows(Journal(tmp_path), end, 300).count_other_rows({}) == 0
    assert ResultRows(Journal(tmp_path), end, 299).count_other_rows({}) == 300
    assert ResultRows(Journal(tmp_path), end, 299).first_other_rows({}) == {"n1": 299}, "as far as it was read"


def test_compacted_rows(tmp_path: Path) -> None:
    messages = write(tmp_path, "rrmrrm", rows=10)
    written.to_parquet(tmp_path, [25, 40])
    written.drop_compacted(tmp_path)
    found = ResultRows(Journal(tmp_path), {"n1": 60})
    assert found.count_other_rows({"n1": 0}) == len(messages)
    assert found.first_other_rows({"n1": 31}) == {"n1": 50}


def test_lag_in_seconds_is_that_of_the_first_message(tmp_path: Path) -> None:
    """A query that only its own results wait for is not behind."""
    opened = segment.SegmentFile.open(tmp_path / "wal/n1", 0, "n1", "hub")
    for first, ago_s, flags in ((0, 90, segment.RESULTS), (10, 60, 0), (20, 30, segment.RESULTS)):
        us, flag = int((time.time() - ago_s) * 1e6), int(Flag.PIPELINE) if flags else 0
        written.append(opened, [one._replace(ts_us=us, flags=flag) for one in written.rows(first, first + 10)], flags)
    opened.close()
    seconds = lag_seconds(str(tmp_path), ignores=lambda name: name == "hot")
    assert seconds("hot", {"n1": 0}) == pytest.approx(60, abs=5)
    assert seconds("all", {"n1": 0}) == pytest.approx(90, abs=5)
    assert seconds("hot", {"n1": 20}) == 0.0
    assert lag_rows(str(tmp_path), ignores=lambda name: True)("hot", {"n1": 0}, {"n1": 30}) == 10


def test_readers_without_results_do_not_wait_for_them(make_site: Callable[..., Site], tmp_path: Path) -> None:
    site = make_site(journal={"path": str(tmp_path / "j")})
    journal, address = site.smq.journal, files.HubAddress.of(tmp_path / "j")
    device = site.device(b"device")
    device.create(b"in")
    journal.commit("q", 0, [(b"out", None, b"1")] * 7)
    journal.publish([(b"out", None, b"2")] * 5)
    journal.flush()
    for name, reads_results in (("own", False), ("all", True)):
        commit.report_progress(address, name, name, {"n1": 0}, results=reads_results)
        os.utime(tmp_path / "j/readers" / f"{name}.json", (time.time() - 90_000,) * 2)
    assert {one.name: behind for one, behind in readers.backlogs(tmp_path / "j")} == {"all": 12, "own": 0}
    stats = journal_stats(Journal(tmp_path / "j"))
    assert (stats.readers, list(stats.stale_readers)) == ({"all": 12, "own": 0}, ["all"])
    watch = readers.ReaderWatch(site.smq.journal.settings)
    assert [sentence.split()[2] for sentence in watch.check(time.time_ns() // 1000)] == ["all"]
    writer.close_all()


def test_what_a_report_says(tmp_path: Path) -> None:
    parsed = [
        readers.parse_report(json.dumps({"query": "q", "offset": {}} | more).encode())["results"]
        for more in ({}, {"results": True}, {"results": False}, {"results": None})
    ]
    assert parsed == [True, True, False, True]


def test_a_rebuilt_index_has_the_flags(tmp_path: Path) -> None:
    write(tmp_path, "rmr")
    (path,) = segment.paths(tmp_path / "wal/n1")
    path.with_suffix(segment.INDEXED).unlink()
    recovery.recover(tmp_path / "wal/n1", schema_message("n1", "hub"))
    assert [entry.flags for entry in segment.read_index(path)] == [segment.RESULTS, 0, segment.RESULTS]


def test_flags_of_newer_versions_say_nothing_of_results(tmp_path: Path) -> None:
    opened = segment.SegmentFile.open(tmp_path / "wal/n1", 0, "n1", "hub")
    written.append(opened, written.rows(0, 4), 128)
    opened.close()
    assert ResultRows(Journal(tmp_path), {"n1": 4}).count_other_rows({}) == 4


# ---- reports, and readers without reports


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """400 rows, one row a second."""
    written.write(tmp_path, [[200], [400]], step_us=SECOND_US)
    return tmp_path


def test_a_silent_pipeline_is_named_once(journal: Path) -> None:
    for query, seq in (("forgotten", 100), ("done", 400), ("busy", 0)):
        report(journal, query, n1=seq)
    silent(journal, "forgotten", 1.5)
    silent(journal, "done", 30)
    watch = readers.ReaderWatch(replace(KEEP, path=journal, reader_timeout_s=7.0 * DAY_S))
    [told] = watch.check(time.time_ns() // 1000)
    assert told.startswith("the pipeline forgotten has read nothing since 2")
    assert ", and 300 messages are unread: they are kept until 2" in told
    assert told.endswith("run it, or run `smqrt pipeline reset forgotten`")
    assert (watch.check(time.time_ns() // 1000), watch.stale, watch.given_up) == ([], 1, 0)
    silent(journal, "forgotten", 8)
    [told] = watch.check(time.time_ns() // 1000)
    assert "it is given up" in told
    assert (watch.stale, watch.given_up) == (1, 1)
    report(journal, "forgotten", n1=300)
    assert (watch.check(time.time_ns() // 1000), watch.stale) == ([], 0)


def test_many_silent_pipelines_fill_no_log(journal: Path) -> None:
    for number in range(30):
        report(journal, f"q{number}", n1=0)
        silent(journal, f"q{number}", 2)
    watch = readers.ReaderWatch(replace(KEEP, path=journal))
    told = watch.check(time.time_ns() // 1000)
    assert len(told) == 21
    assert told[-1] == "10 more pipelines are stale"
    assert (watch.check(time.time_ns() // 1000), watch.stale) == ([], 30)


def test_reports_are_read_in_order_of_their_names(journal: Path) -> None:
    for query in ("b", "a", ".new"):
        report(journal, query, n1=7)
    now_us = silent(journal, "a", 1)
    first, second = readers.load(journal)
    assert (first.name, second.name, first.offset, first.results) == ("a", "b", {"n1": 7}, True)
    assert first.silent_s(now_us) == pytest.approx(86_400)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"offset": 5}', '{"offset": {"n1": "x"}}'])
def test_a_damaged_report_is_named(journal: Path, text: str) -> None:
    report(journal, "q", n1=7)
    (journal / "readers/q.json").write_text(text)
    with pytest.raises(JournalError, match=r"readers/q\.json can't be read .*`smqrt pipeline reset` removes it"):
        list(readers.load(journal))


def test_rows_are_kept_for_the_slowest_reader() -> None:
    some = [Reader("a", {"n1": 7, "n2": 1}, 0), Reader("b", {"n1": 5}, 10_000_000), Reader("c", {"n1": 9}, 10_000_000)]
    assert readers.needed(some, None, 1 << 60) == readers.needed(some, 20.0, 20_000_000) == {"n1": 5, "n2": 1}
    assert readers.needed(some, 20.0, 20_000_001) == {"n1": 5}
    assert readers.needed(some, 20.0, 30_000_001) == {}


def test_a_reader_with_a_backlog_is_stale_after_a_day() -> None:
    reader, day_us = Reader("q", {}, written.START_US), 86_400_000_000
    assert readers.stale_clause(reader, 1234, written.START_US + day_us) == ""
    assert readers.stale_clause(reader, 0, written.START_US + day_us + 1) == ""
    assert readers.stale_clause(reader, 1234, written.START_US + day_us + 1) == (
        "has read nothing since 2025-11-21T14:00:00.000000Z, and 1,234 messages are unread"
    )


def test_a_node_that_a_reader_does_not_know_counts_from_its_begin(journal: Path) -> None:
    written.write(journal, [[50]], node="n2")
    reader = Reader("q", {"n1": 390}, 0)
    assert Backlog(Journal(journal)).of(reader) == 60
    assert Backlog(Journal(journal), begin={"n1": 0, "n2": 30}).of(reader) == 30
    assert Backlog(Journal(journal), begin={"n2": 30}).of(replace(reader, results=False)) == 30


@pytest.mark.parametrize("query", ["", "-q", ".q", "a/b", "q" * 101, "ä", 5, None])
def test_a_query_has_the_name_of_a_file(query: object) -> None:
    for right in ("q", "_q", "0.1-a", "q" * 100):
        assert readers.checked_query(right) == right
    with pytest.raises(ArgumentError, match="is not the id of a query"):
        readers.checked_query(query)


def test_a_report_has_a_time_and_at_most_256_nodes() -> None:
    offset = {f"n{number}": number for number in range(256)}
    parsed = parse_report(json.dumps({"query": "q", "name": None, "offset": offset, "time_us": -1}).encode())
    assert (parsed["name"], parsed["offset"]) == ("", offset)
    assert abs(parsed["time_us"] / 1e6 - time.time()) < 60
    with pytest.raises(ArgumentError, match="offset: it names 257 nodes; a report has 256 at most"):
        parse_report(json.dumps({"query": "q", "offset": {**offset, "m": 0}}).encode())


def test_only_new_queries_count_for_the_limit_of_reports(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert readers.MAX_QUERIES == 10_000
    monkeypatch.setattr(readers, "MAX_QUERIES", 2)
    one, other, more = (parse_report(json.dumps({"query": query, "offset": {"n1": 1}}).encode()) for query in "abc")
    save_report(journal, one)
    save_report(journal, other)
    save_report(journal, {**one, "offset": {"n1": 2}})
    with pytest.raises(ArgumentError, match="2 queries have reports"):
        save_report(journal, more)
    assert [(each.name, each.offset) for each in readers.load(journal)] == [("a", {"n1": 2}), ("b", {"n1": 1})]


def test_a_journal_that_was_moved_gets_no_report(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="can't be written"):
        save_report(tmp_path / "journal", parse_report(b'{"query": "q", "offset": {}}'))
    assert not (tmp_path / "journal").exists()
