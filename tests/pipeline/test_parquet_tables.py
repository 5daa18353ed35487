"""Tables of plain Parquet files whose query changes."""

from __future__ import annotations

from pathlib import Path

from smqrt.pipeline import tables
from tests.pipeline.applications import Application

KEPT = (
    "@source({source}, json='n int, k string')\ndef rows(df): return df\n"
    "@table('kept', partition_by='k')\n"
    "def kept(rows): return rows.select({columns})\n"
)


def test_a_column_more_and_one_of_another_type(app: Application) -> None:
    """The new one is read of all files; of two types nobody could read any."""
    place = app.folder / ".tables" / "kept"
    app.write(KEPT.format(source=app.source, columns="'n', 'k'"))
    app.send({"n": 1, "k": "1"})
    assert app.run() == 0, app.told
    app.write(KEPT.format(source=app.source, columns="'n', 'k', F.length('payload').alias('size')"))
    app.send({"n": 2, "k": "2"}, {"n": 33, "k": "3"})
    assert app.run() == 0, app.told
    found = tables.frame(app.spark, place).select("n", "size").sort("n").collect()
    assert [tuple(row) for row in found] == [(1, None), (2, 18), (33, 19)]
    app.write(KEPT.format(source=app.source, columns="F.col('n').cast('string').alias('n'), 'k'"))
    app.send({"n": 3, "k": "1"})
    assert app.run() == 1
    assert f"The table in {place} has the column n as int, and the result has it as string" in app.told[-1]
    app.write(KEPT.format(source=app.source, columns="'n', 'k'"))
    assert app.run() == 0, app.told
    assert tables.frame(app.spark, place).count() == 4, "nothing is lost"


def test_a_folder_that_cannot_be_made(app: Application, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for kind in ("parquet", "delta", "iceberg"):
        text = KEPT.format(source=app.source, columns="'n', 'k'").replace("'kept', ", f"'kept', format='{kind}', ")
        app.write(text, "p.py")
        assert app.run(tables=f"{tmp_path}/file/x") == 1
        assert f"The folder of tables {tmp_path}/file/x can't be created: Not a directory; use another" in app.told[-1]
        (app.folder / ".pipelines" / "kept" / "query.json").unlink()
