"""Queries on a real hub's journal: what they publish and keep, what they do with time, how they fail."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from smqrt.journal.record import Flag
from smqrt.pipeline import status, tables
from smqrt.pipeline.session import COMMON_SETTINGS
from tests.pipeline.applications import Application
from tests.pipeline.hubs import JournalingHub
from tests.support.waiting import wait_until

PATIENCE_S = 90

COUNTS = (
    "@source({source}, json='k string, v int')\ndef rows(df): return df\n"
    "@publish(to='OUT/{{k}}', mode='update')\n"
    "def counts(rows): return rows.groupBy('k').agg(F.count('*').alias('n'))\n"
)
ECHO = (
    "@source({source}, json='n int')\ndef rows(df): return df\n@publish(to='OUT/echo')\ndef echo(rows): return rows\n"
)


@pytest.fixture
def app(tmp_path: Path, hub: JournalingHub, spark: Any) -> Iterator[Application]:
    """An application whose queries keep their state as `smqrt pipeline run` would."""
    before = {name: spark.conf.get(name, None) for name in COMMON_SETTINGS if "stateStore" in name}
    for name in before:
        spark.conf.set(name, COMMON_SETTINGS[name])
    yield Application(tmp_path, hub, spark)
    for name, value in before.items():
        spark.conf.unset(name) if value is None else spark.conf.set(name, value)


def test_each_message_is_published_once(app: Application) -> None:
    app.write(ECHO.format(source=app.source))
    app.send(*({"n": n} for n in range(5)))
    assert app.run(republish=True) == 0
    assert app.results() == [{"n": n} for n in range(5)]
    app.send({"n": 5})
    assert app.run() == 0
    assert app.run() == 0
    assert [result["n"] for result in app.results()] == list(range(6))
    assert {(row.flags & Flag.PIPELINE, row.txn.rpartition(":")[0]) for row in app.hub.rows(f"{app.topic}/out/#")} == {
        (Flag.PIPELINE, app.status("echo").query_id)
    }
    assert (app.status("echo").state, app.status("echo").published, app.told) == ("finished", 0, [])


def test_old_results_are_computed_but_not_published(app: Application) -> None:
    app.write(COUNTS.format(source=app.source))
    app.send({"k": "a"}, {"k": "b"}, {"k": "a"})
    app.run()
    assert app.results() == []
    app.send({"k": "a"})
    app.run()
    assert app.results() == [{"k": "a", "n": 3}]


EVENTS = [
    {"k": "a", "v": 1, "at": "2026-11-21T10:00:00Z"},
    {"k": "a", "v": 2, "at": "2026-11-21T10:00:05Z"},
    {"k": "b", "v": 1, "at": "2026-11-21T10:01:00Z"},
    # The second micro-batch. The watermark is at 10:00:50, and what is older than that is taken for the last time.
    {"k": "a", "v": 2, "at": "2026-11-21T10:00:05Z"},  # comes again
    {"k": "b", "v": 2, "at": "2026-11-21T10:01:10Z"},
    {"k": "b", "v": 1, "at": "2026-11-21T10:01:00Z"},  # comes again
    # The third one.
    {"k": "a", "v": 9, "at": "2026-11-21T10:00:01Z"},  # is late
    {"k": "z", "v": 0, "at": "2026-11-21T10:05:00Z"},
]
TIMES = """
@source({source}, json="k string, v int, at timestamp", event_time="at", watermark="10 seconds", max_rows=3)
def events(df): return df.select("k", "v", "at", "ts")

@reference("names.csv")
def names(df): return df

def sums(events):
    return events.groupBy(F.window("at", "30 seconds"), "k").agg(F.sum("v").alias("sum")).select("k", "sum")

@publish(to="OUT/final")
def final(events): return sums(events)

@publish(to="OUT/update", mode="update")
def update(events): return sums(events)

@publish(to="OUT/sessions")
def sessions(events):
    return events.groupBy(F.session_window("at", "20 seconds"), "k").agg(F.count("*").alias("n")).select("k", "n")

@publish(to="OUT/dedup")
def dedup(events): return events.dropDuplicatesWithinWatermark(["k", "v", "at"]).select("k", "v")

@publish(to="OUT/named/{{name}}")
def named(events, names): return events.join(names, "k").select("name", "v")

@table("kept", partition_by=["date", "k"])
def kept(events): return events
"""


def test_time_and_tables(app: Application, spark: Any) -> None:
    app.write(TIMES.format(source=app.source))
    (app.folder / "pipelines" / "names.csv").write_text("k,name\na,Anna\nb,Bert\n")
    first = app.end
    app.send(*EVENTS)
    assert app.run(republish=True, start=str(first)) == 0, app.told

    def sums(below: str, value: str = "sum") -> list[tuple[str, int]]:
        return [(result["k"], result[value]) for result in app.results(below)]

    assert sums("final") == [("a", 5), ("b", 4)]
    assert sorted(sums("update")) == [("a", 3), ("a", 5), ("b", 1), ("b", 4), ("z", 0)]
    assert sums("sessions", "n") == [("a", 3), ("b", 3)]
    assert sorted(sums("dedup", "v")) == [("a", 1), ("a", 2), ("b", 1), ("b", 2), ("z", 0)]
    assert sorted(result["v"] for result in app.results("named/Anna")) == [1, 2, 2, 9]
    assert sorted(result["v"] for result in app.results("named/Bert")) == [1, 1, 2]
    folder = app.folder / ".tables" / "kept"
    assert {file.parent.name for file in tables.files(folder)} == {"k=a", "k=b", "k=z"}
    assert tables.frame(spark, folder).groupBy().sum("v").first()[0] == 18
    assert app.status("final").watermark == "2026-11-21T10:04:50.000Z"


def test_one_failure_leaves_the_others_alone(app: Application) -> None:
    app.write(
        f"@source({app.source}, json='n int', dead_letter='OUT/dead')\n"
        "@expect('n < 90', on_fail='dead_letter:OUT/high', name='low')\n"
        "def rows(df): return df\n"
        "@publish(to='OUT/good')\ndef good(rows): return rows\n"
        "@F.udf('int')\ndef inverse(n):\n    return 60 // n\n"
        "@publish(to='OUT/bad')\ndef bad(rows): return rows.select(inverse('n').alias('i'))\n"
    )
    app.send({"n": 2}, {"n": "two"}, b"no JSON", {"n": 99}, {"n": 0})
    assert app.run(republish=True) == 1
    assert app.told == [f"{app.folder}/pipelines/p.py:10: bad: ZeroDivisionError: integer division or modulo by zero"]
    assert app.results("good") == [{"n": 2}, {"n": 0}]
    assert [(letter["reason"], letter["payload"]) for letter in app.results("dead")] == [
        ("the payload is not a JSON object", "no JSON")
    ]
    assert [(letter["reason"], letter["payload"]) for letter in app.results("high")] == [
        ("low", '{"n": "two"}'),
        ("low", '{"n": 99}'),
    ]
    good, bad = app.status("good"), app.status("bad")
    assert (good.state, good.bad_json, good.wrong_type, good.expectations) == ("finished", 1, 1, {"low": 2})
    assert (bad.state, bad.error) == ("failed", app.told[0])


def test_a_query_that_has_changed(app: Application) -> None:
    app.write(COUNTS.format(source=app.source))
    app.send({"k": "a", "v": 1})
    assert app.run() == 0
    app.write(COUNTS.format(source=app.source).replace("groupBy('k')", "groupBy('k', 'v')"))
    app.send({"k": "a", "v": 1})
    assert app.run() == 1
    told = app.told.pop()
    assert told.startswith(f"{app.folder}/pipelines/p.py:5: counts: its checkpoint holds the state of another version")
    assert "smqrt pipeline reset counts removes it" in told
    app.write(COUNTS.format(source=app.source).replace("'update'", "'complete'"))
    assert app.run() == 1
    assert "belongs to another version of counts;" in app.told.pop()


def test_a_hub_that_is_away(app: Application) -> None:
    app.write(ECHO.format(source=app.source))
    app.send({"n": 1})
    app.hub.stop()
    try:
        assert app.run(republish=True) == 1
        assert "echo: The hub hasn't answered (No hub serves" in app.told[0]
        assert "start it with `smqrt serve`" in app.told[0]
        assert len(app.told) == 1
    finally:
        app.hub.restart()
    assert app.run() == 0
    assert app.results() == [{"n": 1}]


def test_a_damaged_segment(app: Application) -> None:
    app.write(ECHO.format(source=app.source).replace("@publish(to='OUT/echo')", "@table('t')"))
    app.send({"n": 1})
    app.journal = str(shutil.copytree(app.hub.journal, app.folder / "copy"))
    [segment, *_] = sorted(Path(app.journal, "wal", "n1").glob("*.arrows"))
    data = bytearray(segment.read_bytes())
    data[-100] ^= 1
    segment.write_bytes(data)
    assert app.run() == 1
    assert f"p.py:5: echo: {segment} is damaged at offset" in app.told[0]
    assert len(app.told) == 1


def test_no_such_thing(app: Application) -> None:
    app.write(
        ECHO.format(source=app.source).replace("def echo(rows): return rows", "def echo(rows): return rows.limt(1)")
    )
    assert app.run() == 1
    assert app.told == [f"{app.folder}/pipelines/p.py:6: echo: Attribute `limt` is not supported."]
    app.write(ECHO.format(source=app.source).replace("rows): return rows", "rows): return rows.groupBy('n').count()"))
    assert app.run() == 1
    assert "echo: mode='append' publishes only final rows, and without a watermark no row becomes final" in app.told[1]


def test_a_query_is_started_again(app: Application) -> None:
    broken = app.folder / "broken"
    broken.touch()
    app.write(
        f"import os\n@source({app.source}, json='n int')\ndef rows(df): return df\n"
        f"@F.udf('int')\ndef checked(n):\n    assert not os.path.exists({str(broken)!r}), 'broken'\n    return n\n"
        "@publish(to='OUT/n', trigger='1 ms')\ndef numbers(rows): return rows.select(checked('n').alias('n'))\n"
    )
    app.send({"n": 1})
    runner = Running(app, republish=True)
    wait_until(lambda: app.told, "the failure is told", PATIENCE_S)
    assert app.told == [f"{app.folder}/pipelines/p.py:8: numbers: AssertionError: broken. It starts again in 1 s."]
    broken.unlink()
    wait_until(app.results, "it goes on", PATIENCE_S)
    assert app.status("numbers").state in status.LIVE
    status.request_stop(app.folder / ".pipelines" / "numbers")
    assert runner.end() == 0
    assert app.status("numbers").state == "stopped"
    assert app.results() == [{"n": 1}]


class Running:
    """The application's queries, run in a thread until they end."""

    def __init__(self, app: Application, **options: Any) -> None:
        self.code: int | None = None
        self._thread = threading.Thread(target=self._run, args=(app, options), daemon=True)
        self._thread.start()

    def _run(self, app: Application, options: dict[str, Any]) -> None:
        self.code = app.run(once=False, **options)

    def end(self) -> int | None:
        """Return the exit code, once there is one."""
        self._thread.join(PATIENCE_S)
        return self.code


Backfill = Callable[..., int]


@pytest.fixture
def backfill(app: Application) -> Backfill:
    """Does a backfill of the application: `backfill(name, start=…)`."""
    from smqrt.pipeline.backfill import backfill as do

    return lambda name, **options: do(app.catalog, name, app.options(**options), app.spark)


def test_backfill(app: Application, backfill: Backfill, spark: Any) -> None:
    app.write(
        f"@source({app.source}, json='n int')\ndef rows(df): return df\n"
        "@table('t', partition_by='date')\ndef kept(rows): return rows\n"
        "@publish(to='OUT/sum')\ndef sums(rows): return rows.groupBy().agg(F.sum('n').alias('sum'))\n"
    )
    app.send({"n": 1}, {"n": 2})
    assert app.run("kept", start="latest") == 0
    app.send({"n": 3})
    assert app.run("kept") == 0
    assert backfill("kept", until=began(app)) == 0
    rows = tables.frame(spark, app.folder / ".tables" / "t")
    assert sorted(row.n for row in rows.select("n").collect()) == [1, 2, 3]
    assert backfill("sums", republish=True) == 0
    assert backfill("sums", republish=True, until=str(app.end)) == 0
    assert app.results() == [{"sum": 6}], "with the same results for a range that only ends later"


def began(app: Application) -> str:
    from smqrt.pipeline import checkpoint

    start = checkpoint.start_offsets(app.folder / ".pipelines" / "kept")
    assert start is not None
    return json.dumps(start)
