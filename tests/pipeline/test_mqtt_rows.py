"""Spark gets QoS, retain flag and properties of MQTT messages, also beside rows of older versions without them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import polars
import pytest
from pyspark.sql import functions as F

from smqrt.journal import arrow, compact, segment
from smqrt.journal.record import Row
from smqrt.pipeline import row_checks
from smqrt.pipeline.history import read_journal
from tests.pipeline.applications import Application
from tests.pipeline.recorded import message

OLDER_ROWS, ROWS = 60, 90


def mqtt_message(seq: int) -> Row:
    """A row whose message every third time is of an MQTT client."""
    row = message(seq)
    return row._replace(qos=seq % 2, retain=True, properties='{"unit":"C"}') if seq % 3 == 0 else row


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Sixty rows of an older version, compacted and not, then thirty of a hub with MQTT clients, the last ones not
    sealed.
    """
    path = tmp_path / "journal"
    with ZipFile(Path(__file__).parent.parent / "journal" / "journal_of_version_1.zip") as archive:
        archive.extractall(path)
    for first in (OLDER_ROWS, OLDER_ROWS + 15):
        opened = segment.SegmentFile.open(path / "wal/n1", first, "n1", "hub", 2)
        rows = [mqtt_message(seq) for seq in range(first, first + 15)]
        opened.append(arrow.encode(rows, arrow.WITH_MQTT), first, 15, rows[0].ts_us, rows[-1].ts_us, 0)
        opened.close()
    return path


WANTED = [(row.seq, row.qos, row.retain, "C") for row in map(mqtt_message, range(OLDER_ROWS, ROWS)) if row.retain]


def found(frame: Any) -> list[tuple[Any, ...]]:
    unit = F.get_json_object("properties", "$.unit")
    chosen = frame.where("properties is not null").select("seq", "qos", "retain", unit)
    return sorted(tuple(row) for row in chosen.collect())


def test_batches_of_old_and_new_rows(spark: Any, journal: Path) -> None:
    for state in ("segments", "both", "files"):
        if state != "segments":
            compact.compact(journal, compact.CompactOptions(grace_s=0, merge_bytes=0, everything=state == "files"))
        source = spark.read.format("smq").load(str(journal))
        assert dict(source.dtypes)["retain"] == "boolean"
        for frame in (source, read_journal(spark, journal)):
            assert frame.count() == ROWS
            assert found(frame) == WANTED, state
            assert frame.where("qos = 1").count() == sum(qos == 1 for _, qos, _, _ in WANTED)


def test_a_table_has_each_row_once(spark: Any, journal: Path, tmp_path: Path) -> None:
    """With exactly-once commits, also when Spark repeats a micro-batch."""
    hub: Any = SimpleNamespace(journal=journal)
    app = Application(tmp_path, hub, spark)
    app.write("@source()\ndef rows(df): return df\n@table('kept', format='delta')\ndef kept(rows): return rows\n")
    assert app.run() == 0, app.told
    commits = tmp_path / ".pipelines/kept/checkpoint/commits"
    for path in (commits / "0", commits / ".0.crc"):  # as after `kill -9` between both commits
        path.unlink(missing_ok=True)
    assert app.run() == 0, app.told
    table = polars.read_delta(str(tmp_path / ".tables/kept")).sort("seq")
    assert table["seq"].to_list() == list(range(ROWS))
    mqtt = table.filter(polars.col("qos").is_not_null())
    assert mqtt.select("seq", "qos", "retain").rows() == [values[:3] for values in WANTED]
    assert mqtt["properties"].unique().to_list() == ['{"unit":"C"}']


def test_json_fields_replace_the_columns_of_these_names(spark: Any) -> None:
    """Sources that read such fields are older than the columns."""
    rows = [('{"qos": "high", "temp": 1}', 1, True, None)]
    frame = spark.createDataFrame(rows, "payload string, qos int, retain boolean, properties string")
    for prefix, wanted in (("", {"qos": "high", "retain": True}), ("m_", {"qos": 1, "retain": True, "m_qos": "high"})):
        options = {"json": "qos string, temp int", "prefix": prefix}
        source: Any = SimpleNamespace(name="rows", where="p.py:1", options=options)
        (row,) = row_checks.parse_json(frame, source)[0].collect()
        assert {name: row[name] for name in wanted} == wanted
