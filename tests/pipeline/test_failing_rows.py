"""Rows that a query fails with: `on_error=` leaves them out, and nothing else."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from smqrt.errors import PipelineError
from smqrt.journal import commit
from smqrt.journal.record import Row
from smqrt.pipeline import failing_rows, row_checks, sinks, tables, testing
from smqrt.pipeline.api import publish, table
from smqrt.pipeline.backfill import backfill
from smqrt.pipeline.failing_rows import Search, Span
from smqrt.pipeline.runner import Runner
from smqrt.wire import smq
from tests.pipeline.applications import HEAD, Application
from tests.pipeline.hubs import JournalingHub
from tests.support.waiting import wait_until

READINGS = "@source({source}, json='n int')\ndef readings(df): return df\n"
TENTHS = (
    READINGS + "@F.udf('double')\ndef tenth(n): return 10 / n\n"
    "@view\ndef tenths(readings): return readings.select('n', tenth('n').alias('x'), 'seq', 'ts')\n"
)


def run(app: Application) -> int:
    """Works off what the test has sent: a search among the rows of all tests would take long."""
    return app.run(republish=True, start=json.dumps({"n1": app.first}))


# ---- the search


class Wrong:
    """Numbers of which some can't be computed; looks at them as Spark would."""

    def __init__(self, *wrong: int, together: tuple[int, ...] = (), always: bool = False) -> None:
        self.wrong, self.together, self.always = {*wrong}, {*together}, always
        self.looks = 0

    def __call__(
        self, start: dict[str, int], end: dict[str, int], left_out: failing_rows.RowNumbers
    ) -> Exception | None:
        self.looks += 1
        rows = {seq for node in end for seq in range(start[node], end[node]) if seq not in left_out.get(node, ())}
        fails = rows & self.wrong or (self.together and self.together <= rows) or self.always
        return ValueError(f"{sorted(rows & self.wrong)[:1]}") if fails else None


def search(wrong: Wrong, span: Span, **options: Any) -> list[int]:
    return [row.seq for row in Search(wrong, span, "q", **options).rows()]


WIDE = Span({"a": 10, "b": 500_000}, {"a": 20, "b": 900_000, "c": 5})


@pytest.mark.parametrize(
    ("rows", "span"),
    [
        ([], WIDE),
        ([10], WIDE),
        ([899_999], WIDE),
        ([0, 4, 19, 500_000], WIDE),
        ([7], Span({}, {"a": 8})),
        ([7], Span({"a": 7}, {"a": 8})),
        ([*range(600_000, 600_050)], WIDE),
    ],
)
def test_every_row_that_fails_is_found(rows: list[int], span: Span) -> None:
    wrong = Wrong(*rows)
    assert sorted(search(wrong, span)) == rows
    assert wrong.looks <= 3 + len(rows) * 42


def test_rows_that_fail_only_together_lose_the_last_one() -> None:
    assert search(Wrong(together=(100, 399_000)), Span({"a": 0}, {"a": 400_000})) == [399_000]
    assert sorted(search(Wrong(5, together=(3, 90)), Span({"a": 0}, {"a": 100}))) == [5, 90]


def test_a_query_that_fails_without_rows_keeps_all() -> None:
    with pytest.raises(PipelineError, match="fails without any row too: ValueError"):
        search(Wrong(always=True), WIDE)


def test_too_many_rows_are_none() -> None:
    assert len(search(Wrong(*range(failing_rows.MAX_ROWS)), Span({}, {"a": 1000}))) == failing_rows.MAX_ROWS
    with pytest.raises(PipelineError, match="fails with more than 100 rows of one micro-batch"):
        search(Wrong(*range(failing_rows.MAX_ROWS + 1)), Span({}, {"a": 1000}))
    for size, apart in ((1000, 1), (100_000, 7)):  # of a bad release; with rows of other topics between
        every = Wrong(*range(0, size, apart))
        with pytest.raises(PipelineError, match="fails with more than 100 rows of one micro-batch"):
            search(every, Span({}, {"a": size}))
        assert every.looks < 12


def test_a_search_that_is_stopped_finds_none() -> None:
    looks = iter([False, False, False, True])
    with pytest.raises(PipelineError, match="the search for the row was stopped"):
        search(Wrong(10), WIDE, stopped=lambda: next(looks))


def test_what_is_left_out_is_remembered(tmp_path: Path) -> None:
    query = tmp_path / "q"
    left_out = failing_rows.LeftOutRows(query)
    for seq in (9, 3, 9):
        left_out.add([failing_rows.FailingRow("n1", seq, "no")], None, None)  # type: ignore[arg-type]
    assert failing_rows.LeftOutRows(query).rows == {"n1": [3, 9]}


# ---- what may be written


@pytest.mark.parametrize("value", ["stop", "dead_letter:", "drop:topic", "", None, 3, "fail:"])
@pytest.mark.parametrize("decorator", [publish, table])
def test_wrong_values_are_refused(decorator: Any, value: Any) -> None:
    with pytest.raises(
        PipelineError, match=r"on_error=.* must be 'fail', 'drop', 'dead_letter' or 'dead_letter:TOPIC'"
    ):
        decorator("x", on_error=value)


# ---- queries


def test_a_message_that_fails_in_a_udf_is_skipped(app: Application) -> None:
    app.write(
        TENTHS.format(source=app.source)
        + "@publish('OUT/x', on_error='dead_letter')\ndef out(tenths): return tenths.select('n', 'x')\n"
        "@table('kept', on_error='dead_letter', dead_letter='OUT/kept')\ndef kept(tenths): return tenths\n"
    )
    first = app.end
    app.send(*({"n": n} for n in [1, 2, 0, 5, 0]))
    assert run(app) == 0, app.told
    assert [row["n"] for row in app.results("x")] == [1, 2, 5]
    assert sorted(row["n"] for row in tables.frame(app.spark, app.folder / ".tables/kept").collect()) == [1, 2, 5]
    assert app.status("out").expectations == {"on_error": 2}
    assert app.status("kept").expectations == {"on_error": 2, row_checks.FITS_TABLE: 0}
    told = [line for line in app.told if "on_error leaves out" in line]
    assert len(told) == 2
    assert f"2 rows, of which the first is row {first + 2} of n1: ZeroDivisionError: division by zero" in told[0]
    found = [row for row in app.hub.rows(f"{app.topic}/out/kept", "dead_letters/out") if row.seq >= first]
    assert len(found) == 2 * 2
    for row in found:
        letter = json.loads(row.payload)
        assert letter["reason"] == "ZeroDivisionError: division by zero"
        assert (letter["topic"], letter["node"], letter["payload"]) == (f"{app.topic}/in/x", "n1", '{"n": 0}')
        assert letter["seq"] in (first + 2, first + 4)
        assert letter["ts"].endswith("Z")
    # What is done once more gives the same.
    app.send({"n": 7}, {"n": 0})
    assert app.run() == 0, app.told
    assert [row["n"] for row in app.results("x")] == [1, 2, 5, 7]


def test_without_on_error_the_query_ends(app: Application) -> None:
    app.write(TENTHS.format(source=app.source) + "@publish('OUT/x')\ndef out(tenths): return tenths\n")
    app.send({"n": 1}, {"n": 0})
    assert run(app) == 1
    assert app.results("x") == []
    assert "ZeroDivisionError" in app.status("out").error


def test_a_query_that_runs_goes_on(app: Application) -> None:
    """Not only with --once: a micro-batch that fails is tried again, then its rows are looked for."""
    app.write(
        TENTHS.format(source=app.source)
        + "@publish('OUT/x', on_error='dead_letter:OUT/wrong')\ndef out(tenths): return tenths.select('n', 'x')\n"
    )
    stopping = threading.Event()
    runner = Runner(app.catalog, app.options(once=False, republish=True), stopping, app.spark)
    thread = threading.Thread(target=runner.run)
    app.send({"n": 1})
    thread.start()
    try:
        wait_until(lambda: len(app.results("x")) == 1, "the first is published", 60)
        for number in range(2):
            app.send({"n": 0}, {"n": 3})
            wait_until(lambda wanted=2 + number: len(app.results("x")) == wanted, app.told, 60)  # type: ignore[misc]
        assert len(app.results("wrong")) == 2
    finally:
        stopping.set()
        thread.join(60)
    assert not thread.is_alive()


def test_errors_that_are_of_no_row_end_the_query(app: Application) -> None:
    app.write(
        READINGS.format(source=app.source) + "@F.udf('int')\ndef none(n): raise ValueError('no service')\n"
        "@expect('n < 100', on_fail='fail')\n@view\ndef small(readings): return readings\n"
        "@publish('OUT/x', on_error='drop')\ndef out(small): return small.select('n')\n"
        "@publish('OUT/y', on_error='drop')\ndef other(readings): return readings.select(none('n').alias('n'))\n"
    )
    app.send({"n": 1000}, *({"n": n} for n in range(150)))
    assert run(app) == 1
    assert "on_fail='fail'" in app.status("out").error
    assert "no row is left out: it fails with more than 100 rows of one micro-batch" in app.status("other").error
    assert app.results() == []


def test_windows_and_alerts_leave_out_too(app: Application) -> None:
    app.write(
        TENTHS.format(source=f"{app.source}, watermark='1 second'")
        .replace("json='n int'", "json='n int, k string'")
        .replace("select('n', ", "select('n', 'k', ")
        + "@publish('OUT/sums', mode='update', on_error='drop')\n"
        "def sums(tenths): return tenths.groupBy('k').agg(F.sum('x').alias('x'))\n"
        "@alert('OUT/alarm/{k}', key='k', when='x > 4', on_error='drop')\ndef alarm(tenths): return tenths\n"
    )
    app.send({"n": 2, "k": "a"}, {"n": 0, "k": "a"}, {"n": 5, "k": "b"})
    assert run(app) == 0, app.told
    assert {row["k"]: row["x"] for row in app.results("sums")} == {"a": 5.0, "b": 2.0}
    assert len(app.results("alarm/a")) == 1
    assert app.results("alarm/b") == []
    assert [row for row in app.hub.rows("dead_letters/#") if row.seq >= app.first] == [], "on_error='drop'"


def test_letters_of_parts_are_published_without_what_fails(app: Application) -> None:
    """The query of a view's dead letters runs the view's function as well."""
    app.write(
        TENTHS.format(source=app.source).replace("@view", "@view\n@expect('n < 100', on_fail='dead_letter:OUT/large')")
        + "@publish('OUT/x', on_error='dead_letter:OUT/wrong')\ndef out(tenths): return tenths.select('n', 'x')\n"
    )
    app.send({"n": 1}, {"n": 0}, {"n": 500})
    assert run(app) == 0, app.told
    assert [row["n"] for row in app.results("x")] == [1]
    assert (len(app.results("large")), len(app.results("wrong"))) == (1, 1)


def test_a_backfill_skips_failing_rows_and_publishes_letters_once(app: Application) -> None:
    app.write(
        TENTHS.format(source=app.source)
        + "@publish('OUT/x', on_error='dead_letter:OUT/wrong')\ndef out(tenths): return tenths.select('n', 'x')\n"
        "@table('kept', on_error='drop')\ndef kept(tenths): return tenths\n"
    )
    first = app.end
    app.send({"n": 1}, {"n": 0}, {"n": 5})
    ends = {"start": json.dumps({"n1": first}), "until": json.dumps({"n1": first + 3})}
    for _ in range(2):
        assert backfill(app.catalog, "out", app.options(republish=True, **ends), app.spark) == 0
    assert backfill(app.catalog, "kept", app.options(**ends), app.spark) == 0
    assert [row["n"] for row in app.results("x")] == [1, 5]
    assert len(app.results("wrong")) == 1
    assert tables.frame(app.spark, app.folder / ".tables/kept").count() == 2


def test_the_test_of_pipelines_leaves_out_and_says_so(tmp_path: Path, spark: Any) -> None:
    folder = tmp_path / "pipelines"
    (folder / "tests").mkdir(parents=True)
    text = HEAD + TENTHS + "@publish('x', on_error='drop')\ndef out(tenths): return tenths.select('n', 'x')\n"
    (folder / "p.py").write_text(text.format(source="'in'"))
    rows = [{"topic": "in", "ts": "2026-01-01T00:00:00Z", "payload": {"n": n}} for n in (1, 0, 2)]
    (folder / "tests/messages.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said: list[str] = []
    assert testing.run(folder, update=True, say=said.append, spark=spark) == 0, said
    assert any("out: on_error leaves out row 1 of" in line for line in said), said
    assert [row["payload"]["n"] for row in json.loads((folder / "tests/out.json").read_text())] == [1, 2]


def test_a_sql_file_has_it_too(app: Application) -> None:
    app.write(TENTHS.format(source=app.source))
    sql = "-- @publish to='OUT/x' on_error='drop'\nselect n, x from tenths\n".replace("OUT", f"{app.topic}/out")
    (app.folder / "pipelines/out.sql").write_text(sql)
    app.send({"n": 1}, {"n": 0})
    assert run(app) == 0, app.told
    assert [row["n"] for row in app.results("x")] == [1]


# ---- what no message can carry


def test_the_limits_are_those_of_frames() -> None:
    assert (commit.MAX_PAYLOAD_BYTES, commit.MAX_NAME_BYTES) == (smq.MAX_PAYLOAD_BYTES, smq.MAX_NAME_BYTES)


def test_rows_too_long_for_a_message_are_skipped(app: Application) -> None:
    app.write(
        READINGS.format(source=app.source)
        + "@view\ndef long(readings): return readings.select('n', F.when(F.col('n') != 2, 'a\"\\x01b').otherwise("
        "F.repeat(F.lit('é\"'), 30000)).alias('k'))\n"
        "@publish('OUT/payload', on_error='dead_letter:OUT/wrong')\ndef payload(long): return long\n"
        "@publish('OUT/dropped')\ndef dropped(long): return long\n"
        "@publish('OUT/topic/{k}')\ndef topic(long): return long.select('k', F.lit('1').alias('payload'))\n"
        "@publish('OUT/sub', subtopic='{k}', on_error='dead_letter:OUT/wrong')\n"
        "def sub(long): return long.select('k', F.lit('2').alias('payload'))\n"
    )
    app.send({"n": 1}, {"n": 2}, {"n": 3})
    assert run(app) == 0, app.told
    assert [row["n"] for row in app.results("payload")] == [1, 3]
    assert [row["n"] for row in app.results("dropped")] == [1, 3]
    assert len(app.results("topic/#")) == len(app.results("sub")) == 2
    letters = {letter["topic"].rpartition("/")[2]: letter for letter in app.results("wrong")}
    assert letters["payload"]["payload_bytes"] > 65_520
    assert letters["sub"]["payload_bytes"] == 1
    for name in ("payload", "dropped", "topic", "sub"):
        assert app.status(name).expectations == {sinks.FITS_MESSAGE: 1}


def test_many_rows_have_the_same_letters(app: Application, spark: Any) -> None:
    """A micro-batch that is done again may have become one of many rows, which a task of Spark publishes."""
    rows = [("t", "", b"x" * 65_521), ('t"\\\n' + "é😀" * 11_000, "s", b"y"), ("short", "s", b"z")]
    frame = spark.createDataFrame(rows, "topic string, subtopic string, payload binary")
    left_out: list[int] = []
    for letters in (f"{app.topic}/out/letters", None):
        hub = sinks.CommitClient(app.journal, None, 5, None, dead_letter_topic=letters, on_left_out=left_out.append)  # type: ignore[arg-type]
        few = hub.fitting(list(sinks.collect_messages(frame)))
        first = app.end
        assert sinks.publish(frame, hub, f"many.{first}", 0, True) == len(few) == (3 if letters else 1)
        stored = [row for row in app.hub.rows() if row.seq >= first]
        found = {(str(row.topic).encode(), (row.subtopic or "").encode(), row.payload) for row in stored}
        assert found == {(topic, subtopic or b"", payload) for topic, subtopic, payload in few}
        if letters:
            assert [json.loads(row[2])["payload_bytes"] for row in few[:2]] == [65_521, 1]
    assert left_out == [2, 2, 2, 2]


def test_names_of_any_bytes_are_published(app: Application) -> None:
    app.write(
        f"@source({app.source})\ndef rows(df): return df\n"
        "@publish('OUT/{k}')\ndef out(rows): return rows.select(F.col('payload').cast('string').alias('k'),"
        " F.lit('1').alias('payload'))\n"
    )
    app.send(b"a\xff", b"\xed\xa0\x80", b"ok")
    assert run(app) == 0, app.told
    assert sorted(row.topic.rpartition("/")[2] for row in app.hub.rows(f"{app.topic}/out/#")) == [
        "a\ufffd",
        "ok",
        "\ufffd" * 3,
    ]


def test_letters_of_long_payloads_are_cut(app: Application) -> None:
    app.write(
        f"@source({app.source}, json='n int', dead_letter='OUT/bad')\ndef rows(df): return df\n"
        "@expect('n < 10', on_fail='dead_letter:OUT/large')\n@table('kept', on_error='drop')\n"
        "def kept(rows): return rows.select('n', F.repeat('topic', 10000).alias('t'))\n"
    )
    app.send(b"\xff" * 65_000, b'"' * 60_000, {"n": 1}, {"n": 20})
    assert run(app) == 0, app.told
    bad, large = app.results("bad"), app.results("large")
    assert [letter["payload_bytes"] for letter in bad] == [65_000, 60_000]
    assert all(letter["reason"] == "the payload is not a JSON object" and letter["node"] == "n1" for letter in bad)
    assert large[0]["row_begin"].startswith('{"n":20,"t":')


def test_both_kinds_of_letters_are_alike(spark: Any) -> None:
    reason, ts_us = 'no\u2028\U0001f600 "good"\x01', 1_795_635_200_000_042
    for payload in (b'{"a":"\xc3\xa9\\n\\u0001"}', b"\xff\x00", b"", b"\x7f<>&", b'"' * 60_000, b"\xff" * 60_000):
        row = {"topic": 't"\\', "subtopic": None, "uid": "u", "node": "n1", "seq": 5, "payload": bytearray(payload)}
        frame = spark.createDataFrame(
            [row], "topic string, subtopic string, uid string, node string, seq bigint, payload binary"
        ).selectExpr("*", f"timestamp_micros({ts_us}) as ts")
        from pyspark.sql import functions as F

        [by_spark] = row_checks.dead_letters([("t", frame.withColumn("reason", F.lit(reason)))]).collect()
        message = Row(5, ts_us, 't"\\', 1, None, None, None, "u", 0, payload, None)
        mine = failing_rows.letter(message, failing_rows.FailingRow("n1", 5, reason))
        assert json.loads(by_spark.payload) == json.loads(mine)
        assert len(by_spark.payload.encode()) <= 65_520


def test_a_hub_that_is_away_gets_the_letters_later(tmp_path: Path, spark: Any) -> None:
    hub = JournalingHub(tmp_path / "app")
    own = tmp_path / "own"
    own.mkdir()
    app = Application(own, hub, spark)
    app.write(
        TENTHS.format(source=app.source)
        + "@table('kept', on_error='dead_letter:OUT/wrong')\ndef kept(tenths): return tenths\n"
    )
    app.send({"n": 1}, {"n": 0})
    hub.stop()
    running = threading.Thread(target=app.run)
    running.start()
    noted = own / ".pipelines/kept/left_out.json"
    wait_until(lambda: noted.exists() and json.loads(noted.read_text())["letters"], app.told, 60)
    hub.restart()
    try:
        running.join(60)
        assert not running.is_alive(), app.told
        assert app.run() == 0, app.told
        assert len(app.results("wrong")) == 1
        assert tables.frame(spark, own / ".tables/kept").count() == 1
    finally:
        hub.stop()
