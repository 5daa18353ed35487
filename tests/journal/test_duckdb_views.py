"""Views of a journal in DuckDB: every row once, JSON as other readers see it, and errors in one sentence."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from smqrt.errors import JournalError
from smqrt.journal import compact
from smqrt.journal.duckdb_views import DuckDB
from smqrt.journal.reader import Journal
from tests.journal.sensor_rows import row, write


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Journal:
    """20 compacted rows in two files and 10 others; the topics "it's" and "a/b" in turn."""
    folder = tmp_path_factory.mktemp("views") / "pl'a[n]t"
    write(folder, [row(seq, topic=("it's", "a/b")[seq % 2], payload=b"%d" % seq) for seq in range(30)], segment_rows=10)
    options = compact.CompactOptions(grace_s=0, max_group_bytes=1, merge_bytes=0)
    assert compact.compact(folder, options).files == 2
    return Journal(folder)


def run(duckdb: DuckDB, sql: str) -> list[dict[str, Any]]:
    _, batches = duckdb.run(sql)
    return [values for batch in batches for values in batch.to_pylist()]


def numbers(journal: Journal, start: int = 0, end: int = 30, topics: Sequence[str] | None = None) -> list[list[int]]:
    """The numbers of the rows in each view."""
    with DuckDB(journal, {"n1": start}, {"n1": end}, topics) as duckdb:
        views = [f"select list(seq order by seq) as found from {view}" for view in ("messages", "compacted")]
        return [run(duckdb, sql)[0]["found"] or [] for sql in views]


@pytest.mark.parametrize(("start", "end"), [(0, 30), (9, 25), (12, 13), (20, 21)])
def test_a_view_has_every_row_of_its_range_once(journal: Journal, start: int, end: int) -> None:
    assert numbers(journal, start, end) == [[*range(start, end)], [*range(start, min(end, 20))]]


@pytest.mark.parametrize(("topics", "first"), [(["it's"], 0), (["a/+", "x"], 1)])
def test_a_view_has_only_wanted_topics(journal: Journal, topics: list[str], first: int) -> None:
    assert numbers(journal, topics=topics) == [[*range(first, 30, 2)], [*range(first, 20, 2)]]


def test_only_valid_json_is_json(tmp_path: Path) -> None:
    valid = ['{"a": 1}', '"NaN, Infinity,]"', '{"NaN\\"": [true, null]}']
    invalid = ['{"a": NaN}', "[1, -Infinity]", "[1, 2,]", "nan", "{"]
    payloads = [*(text.encode() for text in (*valid, *invalid)), b"\xff"]
    write(tmp_path, [row(seq, payload=payload) for seq, payload in enumerate(payloads)])
    with DuckDB(Journal(tmp_path), {}, {"n1": len(payloads)}) as duckdb:
        found = run(duckdb, "select text, json::varchar as json from messages order by seq")
    assert [values["text"] for values in found] == [*valid, *invalid, None]
    assert [values["json"] for values in found] == [*valid, *[None] * 6]


def test_a_view_can_be_used_twice(journal: Journal) -> None:
    with DuckDB(journal, {}, journal.end()) as duckdb:
        assert run(duckdb, "select count(*) as n from messages a join messages b using (seq)") == [{"n": 30}]


def test_an_error_is_one_sentence(journal: Journal) -> None:
    with DuckDB(journal, {}, journal.end()) as duckdb:
        for sql, sentence in (
            ("select 1 from plant", "There is no table or view plant: the messages of the journal are in the view"),
            ("selec 1", 'Parser Error: syntax error at or near "selec".'),
            ("-- nothing", "There is no SQL: write a query"),
            ("select cast(text || 'x' as int) from messages", "Conversion Error: "),
        ):
            with pytest.raises(JournalError) as raised:
                run(duckdb, sql)
            told = str(raised.value)
            assert told.startswith(sentence)
            assert (told[-1], "\n" in told) == (".", False)


def test_a_cancelled_query_ends(journal: Journal) -> None:
    ended = threading.Event()

    def cancel() -> None:
        while not ended.wait(0.01):
            duckdb.cancel()

    with DuckDB(journal, {}, journal.end()) as duckdb:
        thread = threading.Thread(target=cancel)
        thread.start()
        with pytest.raises(JournalError, match="Interrupted"):
            run(duckdb, "select count(*) from messages, range(100_000_000_000) t(i) where hash(i) % 7 = 3")
        ended.set()
        thread.join()


def test_files_that_were_joined_meanwhile(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is made anew when a file that it names has gone."""
    whole = journal.plan
    stale = whole({}, journal.end(), max_rows=1 << 40)
    stale[0][0] = stale[0][0]._replace(file=stale[0][0].file.replace("n1-0", "n1-9"))
    plans = [stale]
    monkeypatch.setattr(journal, "plan", lambda *range, **named: plans.pop() if plans else whole(*range, **named))
    with DuckDB(journal, journal.begin(), journal.end()) as duckdb:
        _, batches = duckdb.run("select count(*) as n from messages")
        assert [batch.to_pylist() for batch in batches] == [[{"n": 30}]]


def test_files_that_go_while_rows_come(journal: Journal, tmp_path: Path) -> None:
    journal = Journal(shutil.copytree(journal.path, tmp_path / "copy"))
    with DuckDB(journal, journal.begin(), journal.end()) as duckdb:
        _, batches = duckdb.run("select a.seq from messages a, range(100000) where text is not null")
        assert next(batches)
        for path in duckdb._files:
            path.unlink()
        with pytest.raises(JournalError, match=r"were merged or have expired .* run it again"):
            duckdb._checked_call(lambda: duckdb._connection.sql("select * from compacted"))


def test_the_share_that_is_done(journal: Journal) -> None:
    with DuckDB(journal, journal.begin(), journal.end()) as duckdb:
        assert duckdb.share() == 0
        _, batches = duckdb.run("select count(*) from messages")
        assert len(list(batches)) == 1
        assert 0 < duckdb.share() <= 1
