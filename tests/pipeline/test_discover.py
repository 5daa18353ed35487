"""A folder of files becomes a catalog; every mistake says in which file and line it is."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from smqrt.errors import PipelineError
from smqrt.pipeline import discover
from smqrt.pipeline.discover import Catalog, load

HEAD = "from smqrt.pipeline import alert, expect, publish, reference, source, table, view\n"
READINGS = HEAD + "@source(topics='site1/#')\ndef readings(df): return df\n"

Write = Callable[..., Catalog]
EARLY = (
    "this needs Spark, which starts after all pipelines are read: give a function's type as an object, such as "
    "F.udf(IntegerType()) of pyspark.sql.types for F.udf('int'), and move other calls into the query."
)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A factory: `write(a_py="…", b_sql="…")` makes the files and loads the folder."""

    def make(**files: str) -> Catalog:
        for name, text in files.items():
            (tmp_path / ".".join(name.rsplit("_", 1))).write_text(text)
        return load(tmp_path)

    return make


def test_python_and_sql(write: Write) -> None:
    catalog = write(
        a_py=READINGS
        + "@publish(to='agg/{topic}')\ndef agg(clean): return clean\ndef clean(readings): return readings\n",
        hot_sql="-- what is hot\n-- @publish to=alerts/{topic} mode=update trigger='1 s'\n"
        "-- @expect 'temp is not null' on_fail=dead_letter:dlq/hot\nSELECT * FROM STREAM readings WHERE temp > 80;",
    )
    kinds = {name: declaration.kind for name, declaration in catalog.declarations.items()}
    assert kinds == {"readings": "source", "agg": "publish", "clean": "view", "hot": "publish"}
    assert [query.name for query in catalog.queries()] == ["agg", "hot"]
    assert [part.name for part in catalog.walk(catalog.get("agg"))] == ["readings", "clean", "agg"]
    hot = catalog.get("hot")
    assert (hot.inputs, hot.options["mode"], hot.options["trigger"]) == (("readings",), "update", "1 s")
    assert (hot.expectations[0].topic, hot.line) == ("dlq/hot", 2)
    assert [source.name for source in catalog.sources_of(hot)] == ["readings"]


def test_all_kinds_in_sql(write: Write) -> None:
    catalog = write(
        readings_sql="-- @source topics=a/#,b/# json='temp double' max_rows=10 include_pipeline=true\n",
        devices_sql="-- @reference devices.csv\n",
        warm_sql="-- @view\nSELECT * FROM readings JOIN devices USING (device)",
        kept_sql="-- @table silver/warm partition_by=date,device\nSELECT * FROM warm",
    )
    readings = catalog.get("readings").options
    assert (readings["topics"], readings["max_rows"], readings["include_pipeline"]) == (("a/#", "b/#"), 10, True)
    assert catalog.get("warm").inputs == ("readings", "devices")
    assert catalog.get("kept").options["partition_by"] == ("date", "device")


def test_other_files_are_left_out(write: Write) -> None:
    catalog = write(a_py=READINGS, _helper_py="1 / 0", test_a_py="1 / 0", notes_sql="SELECT 1", b_txt="1 / 0")
    assert list(catalog.declarations) == ["readings"]


def test_modules_beside_it(write: Write, tmp_path: Path) -> None:
    (tmp_path / "_units.py").write_text("FACTOR = 3\n")
    catalog = write(a_py="import _units\n" + READINGS + "@view\ndef scaled(readings): return _units.FACTOR\n")
    assert catalog.get("scaled").function(None) == 3
    assert "_units" not in sys.modules
    assert str(tmp_path) not in sys.path


def test_an_edit_that_keeps_size_and_second_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is what Python compares to tell whether its bytecode is current."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (tmp_path / "_inside").mkdir()
    for number in (1, 2):
        text = f"import _beside, _inside.deep\n{READINGS}value = {number}, _beside.value, _inside.deep.value\n"
        (tmp_path / "a.py").write_text(text + "@publish(to=f'x/{value}')\ndef agg(readings): return readings\n")
        for name in ("_beside.py", "_inside/deep.py"):
            (tmp_path / name).write_text(f"value = {number}\n")
        for path in tmp_path.rglob("*.py"):
            os.utime(path, (1e9, 1e9))
        [publish] = load(tmp_path).queries()
        assert publish.options["to"] == f"x/{(number,) * 3}"


def test_another_file_may_import_a_source(write: Write) -> None:
    catalog = write(
        a_py=READINGS, b_py=HEAD + "from a import readings\n@publish(to='x')\ndef out(readings): return readings\n"
    )
    assert sorted(catalog.declarations) == ["out", "readings"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("from pyspark.sql import functions as F\n@F.udf('int')\ndef same(n): return n\n", f"a.py:2: {EARLY}"),
        ("from pyspark.sql import functions as F\nN = F.col('n')\n", f"a.py:2: {EARLY}"),
        ("assert False\n", "a.py:1: it can't be loaded: AssertionError: ."),
        ("import nowhere\n", "a.py:1: it can't be loaded: ModuleNotFoundError: No module named 'nowhere'."),
        ("x = 1\ndef f(:\n", "a.py:2: it isn't Python: invalid syntax."),
        (HEAD + "\n@publish()\ndef f(a): return a\n", "a.py:3: publish() missing 1 required positional argument: 'to'"),
        (
            HEAD + "@publish(to='x', mod='y')\ndef f(a): return a\n",
            "a.py:2: @publish has no option 'mod'; did you mean 'mode'?",
        ),
        (
            READINGS + "@publish(to='x')\ndef f(reading): return 0\n",
            "f reads 'reading', which no @source, @reference or",
        ),
        (READINGS + "@publish(to='x')\ndef f(reading): return 0\n", "did you mean 'readings'?"),
        (
            HEAD + "@view\ndef a(b): return b\n@view\ndef b(a): return a\n",
            "a.py:2: a reads b reads a; a pipeline can't read",
        ),
        (
            HEAD + "@reference('x.csv')\ndef r(d): return d\n@publish(to='x')\ndef f(r): return r\n",
            "f reads no @source",
        ),
        (
            READINGS
            + "@alert(to='x', key='k', when='a')\ndef al(readings): return readings\n@view\ndef v(al): return al\n",
            "v reads the alert al; read the inputs of al instead.",
        ),
    ],
)
def test_mistakes_in_python(write: Write, tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PipelineError) as caught:
        write(a_py=text)
    assert str(tmp_path) in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("-- @publsh to=x\nSELECT 1", "a.sql:1: there is no @publsh; there are @source, @view, @publish"),
        ("\n-- @publish to=x trigger='1\nSELECT * FROM readings", "a.sql:2: \"to=x trigger='1\" can't be read"),
        ("-- @publish to=x tto=y\nSELECT * FROM readings", "a.sql:1: @publish has no option 'tto'; did you mean 'to'?"),
        ("-- @publish\nSELECT * FROM readings", "a.sql:1: @publish: missing 1 required positional argument: 'to'."),
        ("-- @publish to=x\n-- @view\nSELECT * FROM readings", "a SQL file has one declaration, and this one 2."),
        ("-- @publish to=x\n", "a.sql:1: @publish needs a query below it."),
        ("-- @source topics=x\nSELECT 1 FROM b", "a.sql:1: @source must not have a query."),
        ("-- @publish to=x\nSELECT * FROM reading", "a reads 'reading', which no @source"),
        (
            "-- @publish to=x\n-- @expect 'a' on_fail=never\nSELECT * FROM readings",
            "a.sql:2: on_fail='never' must be one of",
        ),
        ("-- @publish to=x\nSELECT 1", "a.sql:1: a reads no @source, and so has no rows."),
    ],
)
def test_mistakes_in_sql(write: Write, text: str, message: str) -> None:
    with pytest.raises(PipelineError) as caught:
        write(r_py=READINGS, a_sql=text)
    assert message in str(caught.value)


def test_two_of_one_name(write: Write) -> None:
    with pytest.raises(PipelineError, match=r"b\.py:3: readings is also declared at .*a\.py:2; rename one of them"):
        write(a_py=READINGS, b_py="\n" + READINGS)


def test_no_folder_and_no_query(tmp_path: Path, write: Write) -> None:
    with pytest.raises(PipelineError, match="absent does not exist: pipelines are its .py and .sql files"):
        load(tmp_path / "absent")
    catalog = write(a_py=READINGS)
    with pytest.raises(PipelineError, match="There is no query in"):
        catalog.select()
    with pytest.raises(PipelineError, match="readings is a source and not a query"):
        catalog.select(["readings"])
    with pytest.raises(PipelineError, match="There is no pipeline 'reading'.*did you mean 'readings'"):
        catalog.select(["reading"])


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("select x from a as b join c on b.x = c.x left join `d` using (x)", ["a", "c", "d"]),
        ("SELECT EXTRACT(HOUR FROM ts), TRIM(BOTH ' ' FROM x) FROM a WHERE y IS DISTINCT FROM z", ["a"]),
        ("WITH w AS (SELECT 1 FROM a), v AS (SELECT 2 FROM w) SELECT * FROM w, v, b WHERE f(x, y)", ["a", "b"]),
        ("SELECT 'FROM x' /* FROM y */ -- FROM z\nFROM a, (SELECT * FROM b) c, d GROUP BY e, f", ["a", "b", "d"]),
        ("SELECT * FROM a UNION ALL SELECT x, y FROM a WHERE z IN (SELECT q FROM b)", ["a", "b"]),
    ],
)
def test_inputs_of_sql(query: str, expected: list[str]) -> None:
    assert discover.inputs(query) == expected
