"""@stateful: state of one's own in a stream, over a restart, in a backfill and in a test; timers of both clocks."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.streaming.tws_tester import TwsTester

from smqrt.errors import PipelineError
from smqrt.pipeline import backfill, processors, testing
from smqrt.pipeline.discover import load
from smqrt.pipeline.runner import Runner
from tests.pipeline.applications import Application
from tests.support.waiting import wait_until

PATIENCE_S = 60
HEAD = "from smqrt.pipeline import publish, source, stateful, table, view, alert, expect\n"

# ---- the wrappers, without Java


class Gaps(StatefulProcessor):
    """Tells every row with how many came before it, and a second of silence."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.count = handle.getValueState("count", "n bigint", 5)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        for row in rows:
            (before,) = self.count.get() or (0,)
            self.count.update((before + 1,))
            for due_ms in list(self.handle.listTimers()):
                self.handle.deleteTimer(due_ms)
            self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + 1000)
            yield Row(k=key[0], told=f"{row.v}:{before}")

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield Row(k=key[0], told=f"silent at {expiredTimerInfo.getExpiryTimeInMs()}")


class Ticks(Gaps):
    """Has a timer every 400 ms from its first row on."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        if not list(self.handle.listTimers()):
            self.handle.registerTimer(timerValues.getCurrentWatermarkInMs() + 400)
        yield from (Row(k=key[0], told=str(row.v)) for row in rows)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        self.handle.registerTimer(expiredTimerInfo.getExpiryTimeInMs() + 400)
        yield Row(k=key[0], told=f"tick {timerValues.getCurrentWatermarkInMs()}")


def at(ms: int | None, v: int, k: str = "a") -> Row:
    return Row("k", "v", processors.MILLISECONDS)(k, v, ms)


def simulated(processor: StatefulProcessor, mode: str) -> TwsTester:
    return TwsTester(processor, timeMode=mode, outputMode="Update", eventTimeExtractor=lambda row: row[-1] or 0)


def told(rows: Any) -> list[str]:
    return [row.told for row in rows]


def test_rows_come_in_the_order_of_their_times() -> None:
    test = simulated(processors.InOrder(Gaps(), [2, 1]), "ProcessingTime")
    test.setProcessingTime(10)
    assert told(test.test("a", [at(30, 3), at(20, 2), at(None, 0), at(20, 1)])) == ["0:0", "1:1", "2:2", "3:3"]
    assert told(test.setProcessingTime(1010)) == ["silent at 1010"]


def test_timers_are_fired_between_rows() -> None:
    test = simulated(processors.ByRows(Gaps(), [2], 0, True), "EventTime")
    rows = [at(9000, 3), at(5500, 1), at(5000, 0), at(6499, 2)]
    assert told(test.test("a", rows)) == ["0:0", "1:1", "2:2", "silent at 7499", "3:3"]
    assert told(test.setWatermark(9999)) == []
    assert told(test.setWatermark(10_000)) == ["silent at 10000"], "what comes after the last row is Spark's to fire"


def test_timers_that_lead_to_others_are_fired_in_turn() -> None:
    test = simulated(processors.ByRows(Ticks(), [2], 100, True), "EventTime")
    assert told(test.test("a", [at(5000, 0), at(6000, 1)])) == ["0", "tick 5300", "tick 5700", "1"]
    assert told(test.setWatermark(6900)) == ["tick 6100", "tick 6500", "tick 6900"]


def test_in_a_batch_nothing_comes_after_the_last_row() -> None:
    test = simulated(processors.ByRows(Gaps(), [2], 0, False), "None")
    rows = [at(2000, 1), at(1000, 0), at(5000, 2)]
    assert told(test.test("a", rows)) == ["0:0", "silent at 2000", "1:1", "silent at 3000", "2:2"]


def test_timers_of_earlier_micro_batches_fire_once_in_order() -> None:
    test = simulated(processors.ByRows(Gaps(), [2], 100, True), "EventTime")
    assert told(test.test("a", [at(5000, 0)])) == ["0:0"]
    assert told(test.test("a", [at(5900, 1), at(8000, 2)])) == ["1:1", "silent at 6800", "2:2"]
    assert told(test.setWatermark(7900)) == []
    assert told(test.setWatermark(9000)) == ["silent at 8900"]


def test_a_timer_in_the_past_fires_at_once() -> None:
    class Late(Gaps):
        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
            self.handle.registerTimer(4000)
            yield from (Row(k=key[0], told=str(row.v)) for row in rows)

    test = simulated(processors.ByRows(Late(), [2], 0, True), "EventTime")
    assert told(test.test("a", [at(5000, 0), at(5001, 1), at(5001, 2)])) == ["0", "silent at 5001", "1", "2"]


# ---- the decorator


def declared(text: str, folder: Path) -> Any:
    (folder / "p.py").write_text(HEAD + "@source()\ndef rows(df): return df\n" + text)
    return load(folder)


PROCESSOR = """
class P:
    def init(self, handle): pass
    def handleInputRows(self, key, rows, timerValues): return rows
"""


def test_the_flag_is_allowed_alone_and_in_any_order(tmp_path: Path) -> None:
    catalog = declared(
        PROCESSOR
        + "@stateful(P, key='a', schema='a int')\ndef alone(rows): return rows\n"
        + "@publish(to='x')\n@stateful(P(), key=['a', 'b'], schema='a int', time='event')\ndef one(rows): return rows\n"
        + "@stateful(P, key='a', schema='a int')\n@table('t')\ndef two(alone): return alone\n",
        tmp_path,
    )
    assert [catalog.get(name).kind for name in ("alone", "one", "two")] == ["view", "publish", "table"]
    assert [catalog.get(name).state.key for name in ("alone", "one", "two")] == [("a",), ("a", "b"), ("a",)]
    assert catalog.get("rows").state is None
    assert [processors.endless(catalog.get(name)) for name in ("alone", "one")] == [False, False]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("@alert(to='x', key='a', when='b')\n{}def f(rows): return rows\n", r"f is a @alert, which can't have"),
        ("@source()\n{}def f(df): return df\n", r"f is a @source, which can't have @stateful; add it to a function"),
        ("{}@source()\ndef f(df): return df\n", r"f is a @source, which can't have @stateful; add it to a function"),
        ("{0}{0}def f(rows): return rows\n", r"f has two @stateful; use a second function"),
        ("@stateful(3, key='a', schema='a int')\ndef f(rows): return rows\n", r"3 is not a StatefulProcessor"),
        (
            "@stateful(P, key='a', schema='a int', time='wall')\ndef f(rows): return rows\n",
            r"time='wall' must be one of",
        ),
        ("@stateful(P, key='a', shema='a int', schema='')\ndef f(rows): return rows\n", r"did you mean 'schema'\?"),
    ],
)
def test_what_is_wrong_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(PipelineError, match=r"p\.py:\d+: .*" + said) as caught:
        declared(PROCESSOR + text.format("@stateful(P, key='a', schema='a int')\n"), tmp_path)
    assert "\n" not in str(caught.value)


# ---- in Spark


KINDS = """
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

class Kept(StatefulProcessor):
    def init(self, handle):
        self.sum = handle.getValueState("sum", "v bigint")
        self.all = handle.getListState("all", "v int")
        self.tags = handle.getMapState("tags", "tag string", "v int")

    def handleInputRows(self, key, rows, timerValues):
        for row in rows:
            self.sum.update(((self.sum.get() or (0,))[0] + row.v,))
            self.all.appendValue((row.v,))
            self.tags.updateValue((row.tag,), (row.v,))
        tags = {tag: value for (tag,), (value,) in self.tags.iterator()}
        yield Row(k=key[0], sum=self.sum.get()[0], all=[v for v, in self.all.get()], tags=tags, ts=row.ts)

@source(SOURCE, json="k string, v int, tag string", watermark="1 second")
def rows(df): return df

@stateful(Kept, key="k", schema="k string, sum bigint, all array<int>, tags map<string, int>, ts timestamp")
@expect("v < 100")
def kept(rows): return rows.select("k", "v", "tag", "ts", "seq")

@publish(to="OUT/{k}", mode="update")
def out(kept): return kept

@table("kept")
def saved(kept): return kept
"""


def test_values_lists_and_maps_survive_restart_and_backfill(app: Application, spark: Any) -> None:
    app.write("from smqrt.pipeline import stateful\n" + KINDS.replace("SOURCE", app.source))
    first = app.end
    app.send({"k": "a", "v": 1, "tag": "x"}, {"k": "b", "v": 5, "tag": "x"}, {"k": "a", "v": 2, "tag": "y"})
    assert app.run("out", republish=True, start=str(first)) == 0, app.told
    app.send({"k": "a", "v": 3, "tag": "x"}, {"k": "a", "v": 999, "tag": "z"}, {"v": 4, "tag": "z"})
    assert app.run("out", republish=True) == 0, app.told
    found = sorted(app.results(), key=lambda each: (each["k"], each["sum"]))
    assert [(each["k"], each["sum"], each["all"], each["tags"]) for each in found] == [
        ("a", 3, [1, 2], {"x": 1, "y": 2}),
        ("a", 6, [1, 2, 3], {"x": 3, "y": 2}),
        ("b", 5, [5], {"x": 5}),
    ]
    times = {row.seq: row.ts_us for row in app.hub.rows(f"{app.topic}/in/x")}
    sent_ms = sorted(ts_us // 1000 for ts_us in times.values())
    assert found[1]["ts"] == _iso(sent_ms[3]), "a time comes out as it went in"
    backfill.backfill(app.catalog, "saved", app.options(start=str(first)), spark)
    from smqrt.pipeline import tables

    rows = tables.frame(spark, app.folder / ".tables" / "kept").collect()
    assert sorted((row.k, row["sum"], row.all) for row in rows) == [("a", 6, [1, 2, 3]), ("b", 5, [5])]


def _iso(ms: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


SILENCE = """
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

class Silence(StatefulProcessor):
    def init(self, handle):
        self.handle = handle
        self.told = handle.getValueState("told", "n int", 3_600_000)
        self.short = handle.getValueState("short", "n int", 1)

    def handleInputRows(self, key, rows, timerValues):
        for due in list(self.handle.listTimers()):
            self.handle.deleteTimer(due)
        self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + 1500)
        yield Row(k=key[0], said=f"here {len(list(rows))}")

    def handleExpiredTimer(self, key, timerValues, expiredTimerInfo):
        n = (self.told.get() or (0,))[0] + 1
        self.told.update((n,))
        yield Row(k=key[0], said=f"silent {n}{', not forgotten' if self.short.exists() else ''}")
        self.short.update((1,))

@source(SOURCE, json="k string")
def rows(df): return df

@publish(to="OUT/{k}", mode="update", trigger="200 ms")
@stateful(Silence, key="k", schema="k string, said string", time="processing")
def silent(rows): return rows.select("k", "ts", "seq")
"""


def test_processing_time_timers_fire_without_rows_and_after_restart(app: Application) -> None:
    app.write("from smqrt.pipeline import stateful\n" + SILENCE.replace("SOURCE", app.source))
    first = app.end
    app.send({"k": "a"})
    assert app.run(republish=True, start=str(first)) == 0, app.told
    assert [each["said"] for each in app.results()] == ["here 1"], "once ends, although there is a timer to come"
    assert app.spark.conf.get("spark.sql.streaming.noDataMicroBatches.enabled") == "true", "for whom starts next"
    stopping = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(Runner(app.catalog, app.options(once=False), stopping, app.spark).run)
        try:
            wait_until(lambda: len(app.results()) == 2, "the timer that was set before the restart", PATIENCE_S)
            app.send({"k": "a"})
            wait_until(lambda: len(app.results()) == 4, "and the next one", PATIENCE_S)
        finally:
            stopping.set()
    assert running.result() == 0
    assert [each["said"] for each in app.results()] == ["here 1", "silent 1", "here 1", "silent 2"]
    assert app.told == ["Stopping after the current micro-batch; press Ctrl-C again to stop immediately."]


TICKS = """
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

class Ends(StatefulProcessor):
    def init(self, handle):
        self.handle = handle
        self.count = handle.getValueState("count", "n int, last bigint")

    def handleInputRows(self, key, rows, timerValues):
        n, last = self.count.get() or (0, 0)
        for row in rows:
            n, last = n + 1, max(last, row.ms)
        for due in list(self.handle.listTimers()):
            self.handle.deleteTimer(due)
        self.count.update((n, last))
        self.handle.registerTimer(last + 10_000)
        yield from ()

    def handleExpiredTimer(self, key, timerValues, expiredTimerInfo):
        n, last = self.count.get()
        self.count.clear()
        yield Row(k=key[0], n=n, last=last)

@source(SOURCE, json="k string, at timestamp", event_time="at", watermark="2 seconds")
def rows(df): return df

@publish(to="OUT/{k}")
@stateful(Ends, key="k", schema="k string, n int, last bigint", time="event")
def visits(rows): return rows.select("k", "at", F.unix_millis("at").alias("ms"))
"""
VISITS = [("a", 0), ("a", 5), ("b", 6), ("a", 40), ("b", 41), ("a", 45), ("z", 90)]


def test_the_watermark_fires_timers_as_a_backfill_does(app: Application, spark: Any) -> None:
    app.write("from smqrt.pipeline import stateful\n" + TICKS.replace("SOURCE", app.source + ", max_rows=2"))
    first = app.end
    app.send(*({"k": k, "at": f"2026-11-21T10:{s // 60:02}:{s % 60:02}Z"} for k, s in VISITS))
    assert app.run(republish=True, start=str(first)) == 0, app.told

    def found() -> list[tuple[str, int]]:
        return sorted((each["k"], each["n"]) for each in app.results())

    assert found() == [("a", 2), ("a", 2), ("b", 1), ("b", 1)]
    app.write((app.folder / "pipelines" / "p.py").read_text().replace("/out/", "/out/again/"))
    backfill.backfill(app.catalog, "visits", app.options(start=str(first), republish=True), spark)
    again = sorted((each["k"], each["n"]) for each in app.results("again/#"))
    assert again == [("a", 2), ("b", 1)], "in a backfill silences that ended"


def test_what_cannot_be_planned_is_one_sentence(app: Application) -> None:
    text = "from smqrt.pipeline import stateful\n" + TICKS.replace("SOURCE", app.source)
    for changed, said in (
        (text.replace(', watermark="2 seconds"', ""), r"visits has time='event', whose clock is the watermark: give"),
        (text.replace('key="k"', 'key="kk"'), r"visits needs the column 'kk', which its function must return; it has"),
        (text.replace("k string, n int, last bigint", "k string, n itn"), r"visits: schema='.*n itn' can't be read: "),
        (
            text.replace('"n int, last bigint")', '"n int, last bigint", 1000)'),
            r"visits: the state 'count' has a",
        ),
        (text.replace('"event")', '"processing")'), r"visits needs the column 'ts', which its function must return"),
    ):
        app.told.clear()
        app.write(changed)
        assert app.run() == 1
        [sentence] = app.told
        assert re.search(r"p\.py:\d+: @stateful " + said, sentence), sentence


def test_a_test_has_the_clock_of_the_messages(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    code = SILENCE.replace("SOURCE", "'in/#'").replace("OUT/", "")
    (tmp_path / "p.py").write_text(HEAD + code)
    seconds = [("a", 0), ("a", 1.4), ("b", 2), ("a", 5)]
    rows = ({"topic": "in/x", "ts": 1_795_262_400 + second, "payload": {"k": k}} for k, second in seconds)
    (tmp_path / "tests" / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    said: list[str] = []
    assert testing.run(tmp_path, update=True, spark=spark, say=said.append) == 0, said
    found = [row["payload"] for row in json.loads((tmp_path / "tests" / "silent.json").read_text())]
    assert sorted((row["k"], row["said"]) for row in found) == [
        ("a", "here 1"),
        ("a", "here 1"),
        ("a", "here 1"),
        ("a", "silent 1"),
        ("b", "here 1"),
        ("b", "silent 1"),
    ]


def test_an_error_of_a_processor_names_its_line(app: Application) -> None:
    app.write(
        "from smqrt.pipeline import stateful\n" + SILENCE.replace("SOURCE", app.source).replace("+ 1500", "+ None")
    )
    first = app.end
    app.send({"k": "a"})
    assert app.run(start=str(first)) == 1
    [sentence] = app.told
    assert f"{line_of(app, '+ None')}: silent: TypeError: unsupported operand" in sentence


def test_an_error_of_its_init_names_its_line(app: Application) -> None:
    app.write("from smqrt.pipeline import stateful\n" + TICKS.replace("SOURCE", app.source).replace('"count"', "cuont"))
    assert app.run() == 1
    [sentence] = app.told
    assert f"{line_of(app, 'cuont')}: visits: NameError: name 'cuont' is not defined" in sentence


def line_of(app: Application, part: str) -> str:
    lines = (app.folder / "pipelines" / "p.py").read_text().splitlines()
    return f"p.py:{next(number for number, text in enumerate(lines, 1) if part in text)}"
