"""A checkpoint belongs to the stateful operators that made it; state that grows for ever is noticed at the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smqrt.pipeline import stateful_plan, testing
from smqrt.pipeline.doctor import DoctorOptions, check_plans
from smqrt.pipeline.graph import Graph, JournalSource, QueryStart
from tests.pipeline.applications import Application

REPOSITORY = Path(__file__).parent.parent.parent
SOURCE = "@source({source}, json='{json}', event_time='at', watermark='{watermark}')\ndef rows(df): return df\n"
JSON = "at timestamp, k string, j string, v int, w int"


def text(app: Application, body: str, *, json: str = JSON, watermark: str = "10 seconds", head: str = "") -> str:
    return SOURCE.format(source=app.source, json=json, watermark=watermark) + head + body


def publishing(result: str, mode: str = "update") -> str:
    return f"@publish(to='OUT/x', mode='{mode}')\ndef counts(rows): return {result}\n"


WINDOWS = publishing("rows.groupBy(F.window('at', '3 seconds'), 'k').agg(F.count('*').alias('n'))")


def described(app: Application, written: str) -> list[dict[str, Any]]:
    """What is kept of the query `counts`, without running it."""
    app.write(written)
    catalog = app.catalog
    rows = JournalSource(app.journal)
    graph = Graph(catalog, lambda one: rows.stream(app.spark, one, QueryStart({}, None), one.name), lambda one: one)
    frame = graph.frame(catalog.declarations["counts"])
    found = stateful_plan.operators_of(frame, catalog.declarations["counts"])
    assert found is not None
    return [one.description() for one in found]


HARMLESS = {
    "other names of columns": publishing(
        "rows.groupBy(F.window('at', '3 seconds').alias('w'), F.col('k').alias('key')).agg(F.count('*').alias('m'))"
    ),
    "a filter": publishing(
        "rows.where('v > 3').groupBy(F.window('at', '3 seconds'), 'k').agg(F.count('*').alias('n'))"
    ),
    "what is made of the result": publishing(
        "rows.groupBy(F.window('at', '3 seconds'), 'k').agg((F.count('*') * 2).alias('n')).withColumn('x', F.lit(1))"
    ),
    "an aggregate that nobody reads": publishing(
        "rows.groupBy(F.window('at', '3 seconds'), 'k').agg(F.count('*').alias('n'), F.max('v')).select('k', 'n')"
    ),
    "by way of a column": publishing(
        "rows.withColumn('w', F.window('at', '3 seconds')).groupBy('w', 'k').agg(F.count('*').alias('n'))"
    ),
}
CHANGED = {
    "length": (
        "F.window('at', '3 seconds')",
        "F.window('at', '5 seconds')",
        "window(at, 3 seconds) → window(at, 5 seconds)",
    ),
    "slide": ("'3 seconds'", "'3 seconds', '1 second'", "window(at, 3 seconds) → window(at, 3 seconds, 1 second)"),
    "shift": ("'3 seconds'", "'3 seconds', startTime='1 second'", "→ window(at, 3 seconds, from 1 second)"),
    "column of time": ("'at', '3 s", "'ts', '3 s", "window(at, 3 seconds) → window(ts, 3 seconds)"),
    "session": ("F.window('at'", "F.session_window('at'", "window(at, 3 seconds) → session_window(at, 3 seconds)"),
    "key": ("'k')", "'j')", "k string → j string"),
    "order of keys": ("'k')", "'k', 'j')", "k string → window(at, 3 seconds), k string, j string"),
    "aggregate": ("F.count('*')", "F.max(F.lit(1).cast('bigint'))", "count(1) bigint → max("),
    "what is counted": ("F.count('*')", "F.count('v')", "count(1) bigint → count(v) bigint"),
    "no state": ("groupBy(F.window('at', '3 seconds'), 'k').agg(F.count('*').alias('n'))", "select('k')", "→ no state"),
    "another operator": (
        "groupBy(F.window('at', '3 seconds'), 'k').agg(F.count('*').alias('n'))",
        "dropDuplicatesWithinWatermark(['k'])",
        "groupBy(window(at, 3 seconds), k string) → dropDuplicatesWithinWatermark(k string)",
    ),
}


def test_a_description_has_only_the_meaning_of_states(app: Application) -> None:
    before = described(app, text(app, WINDOWS))
    assert described(app, text(app, WINDOWS)) == before, "Spark's numbers of expressions differ"
    for name, body in HARMLESS.items():
        assert stateful_plan.changes(before, described(app, text(app, body))) == [], name
    wider = text(app, WINDOWS, json=JSON + ", more double", watermark="1 minute")
    assert stateful_plan.changes(before, described(app, wider)) == [], "fields of JSON, and how late messages may be"
    typed = described(app, text(app, WINDOWS, json=JSON.replace("k string", "k bigint")))
    assert stateful_plan.changes(before, typed) == ["k string → k bigint"]
    for name, (old, new, told) in CHANGED.items():
        assert old in WINDOWS, name
        [found] = stateful_plan.changes(before, described(app, text(app, WINDOWS.replace(old, new))))
        assert told in found, name


CUSTOM = (
    "import pandas as pd\n"
    "def take(key, frames, state):\n    yield pd.DataFrame({{'k': [key[0]]}})\n"
    "from pyspark.sql.streaming import StatefulProcessor\n"
    "from smqrt.pipeline import stateful\n"
    "class Last(StatefulProcessor):\n"
    "    def init(self, handle): self.last = handle.getValueState('last', 'v int')\n"
    "    def handleInputRows(self, key, rows, times): yield from ()\n"
    "@F.udf('string')\ndef bucket(k): return k[:1]\n"
    "@F.udf('string')\ndef tail(k): return k[1:]\n"
)
STATEFUL = (
    "@publish(to='OUT/x')\n@stateful(Last, {}, schema='k string')\n"
    "def counts(rows): return rows.select('k', 'j', 'ts')\n"
)
PAIRS = {
    "keys of dropDuplicates": (
        publishing("rows.dropDuplicatesWithinWatermark(['k'])", "append"),
        publishing("rows.dropDuplicatesWithinWatermark(['j'])", "append"),
        "k string → j string",
    ),
    "aggregates in another order": (
        publishing("rows.groupBy().agg(F.sum('v').alias('a'), F.sum('w').alias('b'))"),
        publishing("rows.groupBy().agg(F.sum('w').alias('b'), F.sum('v').alias('a'))"),
        "sum(v) bigint, sum(w) bigint → sum(w) bigint, sum(v) bigint",
    ),
    "a function of Python": (
        publishing("rows.groupBy(bucket('k')).count()"),
        publishing("rows.groupBy(tail('k')).count()"),
        "bucket(k) string → tail(k) string",
    ),
    "what a join compares": (
        publishing("rows.join(rows.select(F.col('k').alias('k2')), F.expr('k = k2'))", "append"),
        publishing("rows.join(rows.select(F.col('j').alias('k2')), F.expr('k = k2'))", "append"),
        "(k = k) → (k = j)",
    ),
    "the kind of a join": (
        publishing(
            "rows.join(rows.select(F.col('k').alias('k2'), F.col('at').alias('t2')), F.expr('k = k2 and t2 = at'))"
        ),
        publishing(
            "rows.join(rows.select(F.col('k').alias('k2'), F.col('at').alias('t2')),"
            " F.expr('k = k2 and t2 = at'), 'left')"
        ),
        "Inner → LeftOuter",
    ),
    "a state by key": (
        publishing("rows.groupBy('k').applyInPandasWithState(take, 'k string', 'n int', 'append', 'NoTimeout')"),
        publishing("rows.groupBy('j').applyInPandasWithState(take, 'k string', 'n int', 'append', 'NoTimeout')"),
        "k string → j string",
    ),
    "columns of a state by key": (
        publishing("rows.groupBy('k').applyInPandasWithState(take, 'k string', 'n int', 'append', 'NoTimeout')"),
        publishing("rows.groupBy('k').applyInPandasWithState(take, 'k string', 'm int', 'append', 'NoTimeout')"),
        "struct<n:int> → struct<m:int>",
    ),
    "the key of @stateful": (
        STATEFUL.format("key='k'"),
        STATEFUL.format("key='j'"),
        "k string → j string",
    ),
    "the clock of @stateful": (
        STATEFUL.format("key='k'"),
        STATEFUL.format("key='k', time='processing'"),
        "timers: NoTime → timers: ProcessingTime",
    ),
    "the key of an alert": (
        "@alert(to='OUT/a', key='k', when='v > 1')\ndef counts(rows): return rows\n",
        "@alert(to='OUT/a', key='j', when='v > 1')\ndef counts(rows): return rows\n",
        "k string → j string",
    ),
    "the value of a rate": (
        "@alert(to='OUT/a', key='k', rate='v > 5 per 1 minute')\ndef counts(rows): return rows\n",
        "@alert(to='OUT/a', key='k', rate='w > 5 per 1 minute')\ndef counts(rows): return rows\n",
        "rate of v > 5 → rate of w > 5",
    ),
}


def test_descriptions_of_the_other_operators(app: Application) -> None:
    for name, (old, new, told) in PAIRS.items():
        before, now = (described(app, text(app, body, head=CUSTOM.format())) for body in (old, new))
        assert told in "; ".join(stateful_plan.changes(before, now)), name
    again = "@alert(to='OUT/b', key='k', when='v > 7', cooldown='1 minute')\ndef counts(rows): return rows\n"
    first = PAIRS["the key of an alert"][0]
    assert not stateful_plan.changes(described(app, text(app, first)), described(app, text(app, again))), "thresholds"


def test_state_of_another_version_is_refused_and_stays(app: Application) -> None:
    state = app.folder / ".pipelines" / "counts"
    app.write(text(app, WINDOWS))
    app.send({"k": "a", "at": "2026-11-21T10:00:00Z"}, {"k": "a", "at": "2026-11-21T10:00:02Z"})
    assert app.run(republish=True) == 0, app.told
    (state / "operators.json").unlink()
    assert app.run() == 0, "a checkpoint from before is adopted"
    app.write(text(app, WINDOWS.replace("3 seconds", "5 seconds")))
    app.send({"k": "a", "at": "2026-11-21T10:00:01Z"})
    assert app.run() == 1
    assert "counts: its checkpoint holds the state of another version of this query" in app.told[-1]
    assert "window(at, 3 seconds) → window(at, 5 seconds)" in app.told[-1]
    assert "smqrt pipeline reset counts" in app.told[-1]
    assert app.status("counts").error == app.told[-1]
    app.write(text(app, WINDOWS.replace("alias('n')", "alias('times')")))
    assert app.run() == 0, app.told
    assert [result.get("n") or result["times"] for result in app.results()] == [2, 3], "with the state of before"


def test_plain_tables_keep_their_folders(app: Application) -> None:
    kept = "@table('kept', partition_by='{by}')\ndef kept(rows): return rows\n"
    app.write(text(app, kept.format(by="k")))
    app.send({"k": "a", "j": "b"})
    assert app.run() == 0, app.told
    app.write(text(app, kept.format(by="j")))
    assert app.run() == 1
    assert "partition_by was k and is j" in app.told[-1]


# ---- state that grows for ever

START = publishing("rows.groupBy('k', F.window('at', '1 minute').start.alias('minute')).count()")
ENDLESS = {
    "a part of a window": (START, ["minute (window(at, 1 minute).start) has lost", 'F.window("at", …)']),
    "a rounded time": (
        publishing("rows.groupBy(F.date_trunc('hour', 'at').alias('hour')).count()"),
        ["hour (date_trunc(hour, at)) has lost"],
    ),
    "no time": (publishing("rows.groupBy('k').count()"), ["groupBy by k string has no key with the watermark"]),
    "windows of another time": (
        publishing("rows.groupBy(F.window('ts', '1 minute')).count()"),
        ["window(ts, 1 minute) has no key with the watermark; set it on the time of the windows: event_time='ts'"],
    ),
    "duplicates": (publishing("rows.dropDuplicates(['k'])"), ["write dropDuplicatesWithinWatermark, or add at"]),
    "duplicates of an hour": (
        publishing("rows.withColumn('hour', F.date_trunc('hour', 'at')).dropDuplicates(['k', 'hour'])"),
        ["hour (date_trunc(hour, at)) has lost; write dropDuplicatesWithinWatermark, or add at itself."],
    ),
    "a join": (
        publishing("rows.join(rows.select(F.col('k').alias('k2')), F.expr('k = k2'))", "append"),
        ["has no condition on times"],
    ),
}
BOUNDED = [
    WINDOWS,
    publishing("rows.groupBy().count()"),
    publishing("rows.groupBy('k').count()", "complete"),
    publishing("rows.dropDuplicates(['k', 'at'])"),
    publishing("rows.dropDuplicatesWithinWatermark(['k'])"),
    publishing("rows.groupBy(F.session_window('at', '5 seconds'), 'k').count()", "append"),
    publishing("rows.groupBy('at').count()"),
    publishing(
        "rows.join(rows.select(F.col('k').alias('k2'), F.col('at').alias('t2')),"
        " F.expr('k = k2 and t2 between at and at + interval 1 minute'))",
        "append",
    ),
    "@alert(to='OUT/a', key='k', when='v > 1')\ndef counts(rows): return rows\n",
    publishing("rows.select('k')"),
]


def test_unbounded_state_is_reported(app: Application) -> None:
    for name, (body, told) in ENDLESS.items():
        warning = warned(app, text(app, body))
        assert warning.startswith("its state grows without bound"), name
        assert [one for one in told if one not in warning] == [], name
    for body in BOUNDED:
        assert warned(app, text(app, body)) == "", body


def warned(app: Application, written: str) -> str:
    app.write(written)
    options = DoctorOptions(app.folder, app.folder / ".pipelines", app.journal)
    found = {each.name: each for each in check_plans(options, app.spark)}
    assert found["counts"].ok, found["counts"]
    check = found.get("counts state")
    return f"{check.detail}: {check.remedy}" if check else ""


@pytest.mark.parametrize("application", ["telemetry", "made by init"])
def test_what_comes_with_smqrt_forgets(app: Application, application: str) -> None:
    folder = REPOSITORY / "app_preload" / application
    if application == "made by init":
        folder = app.folder
        testing.make_pipeline(folder / "pipelines", "per_minute")
    checks = list(check_plans(DoctorOptions(folder, app.folder / ".pipelines", app.journal), app.spark))
    assert checks
    assert [check for check in checks if not check.ok or check.remedy] == []


def test_a_start_warns_and_the_status_keeps_it(app: Application) -> None:
    app.write(text(app, START))
    app.send({"k": "a", "at": "2026-11-21T10:00:00Z"})
    assert app.run() == 0
    [told] = app.told
    assert "counts: Warning: its state grows without bound" in told
    assert "minute (window(at, 1 minute).start)" in app.status("counts").warning
    app.write(text(app, START.replace("'update'", "'append'")), "p.py")
    options = DoctorOptions(app.folder, app.folder / ".pipelines", app.journal)
    [check] = check_plans(options, app.spark)
    assert not check.ok
    assert "mode='append' publishes only final rows, and no row becomes final" in check.detail + check.remedy
    assert "minute (window(at, 1 minute).start) has lost; group by F.window" in check.detail + check.remedy
    app.write(text(app, publishing("rows.groupBy().count()", "append")), "p.py")
    [check] = check_plans(options, app.spark)
    assert "groupBy without a key has no key with the watermark; group by F.window" in check.detail + check.remedy


def test_a_watermark_needs_its_column(app: Application) -> None:
    app.write(text(app, publishing("rows.select('k')"), json="k string"))
    assert app.run() == 1
    assert (
        "watermark='10 seconds' for the column 'at', which is missing in its messages and in the result of its function"
        in app.told[0]
    )
