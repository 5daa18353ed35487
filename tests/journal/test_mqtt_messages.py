"""Messages of MQTT clients in a journal: with QoS, retain flag and properties, beside those of SMQ clients."""

from __future__ import annotations

import json
import random
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deltalake
import polars
import pyarrow as pa
import pytest
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from smqrt import hub
from smqrt.journal import arrow, compact, delta_table, manifest, parquet_files, recovery, segment, writer
from smqrt.journal.duckdb_views import DuckDB
from smqrt.journal.mqtt_columns import MAX_JSON_BYTES, NO_PROPERTIES, properties_json, properties_of
from smqrt.journal.reader import Journal
from smqrt.journal.record import COLUMNS, Flag, Row
from smqrt.journal.verification import verify
from smqrt.server.mqtt import take_mqtt
from smqrt.wire.mqtt.fields import PacketType, pack_properties
from tests.journal import written
from tests.journal.sensor_rows import readings
from tests.support.device import Site
from tests.support.waiting import wait_until

EVERYTHING = compact.CompactOptions(grace_s=0, everything=True)
MQTT = [("qos", 1), ("retain", True), ("properties", '{"unit":"°C"}')]


class Sensor:
    """paho's client, connected to a hub."""

    def __init__(self, site: Site, name: str, **will: Any) -> None:
        self.client = paho.Client(CallbackAPIVersion.VERSION2, name, protocol=5)
        if will:
            self.client.will_set(**will)
        self.client.connect(*site.address())
        self.client.loop_start()
        wait_until(self.client.is_connected, "it is connected")

    def publish(self, topic: str, payload: bytes, qos: int = 0, retain: bool = False, **properties: Any) -> None:
        packed = Properties(PacketTypes.PUBLISH)
        for key, value in properties.items():
            setattr(packed, key, value)
        sent = self.client.publish(topic, payload, qos, retain, packed if properties else None)
        wait_until(sent.is_published, "the message is published")

    def close(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()


@pytest.fixture
def recorded_site(make_site: Callable[..., Site], tmp_path: Path) -> Callable[..., Site]:
    def make(**options: Any) -> Site:
        site = make_site(mqtt=True, journal={"path": str(tmp_path)} | options)
        site.server.take_mqtt = take_mqtt
        return site

    return make


@pytest.fixture
def connect() -> Iterator[Callable[..., Sensor]]:
    opened: list[Sensor] = []

    def make(*arguments: Any, **more: Any) -> Sensor:
        opened.append(Sensor(*arguments, **more))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def flushed(path: Path) -> Journal:
    for one in writer.opened.values():
        one.flush()
    return Journal(path)


def rows(path: Path) -> list[Row]:
    journal = flushed(path)
    return list(journal.rows({}, journal.end()))


def queried(path: Path, sql: str) -> list[tuple[Any, ...]]:
    journal = flushed(path)
    with DuckDB(journal, {}, journal.end()) as duckdb:
        _, batches = duckdb.run(sql)
        return [tuple(values.values()) for batch in batches for values in batch.to_pylist()]


# ---- recording


@pytest.mark.parametrize("kernels", ["fastest", "pure"])
def test_a_real_client(
    recorded_site: Callable[..., Site],
    connect: Callable[..., Sensor],
    tmp_path: Path,
    kernels: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SMQRT_KERNELS", kernels)
    site = recorded_site()
    device = site.device(b"smq-client")
    topic = device.subscribe(b"t/1")
    sensor = connect(site, "sensor")
    site.smq.publish(b"0", "t/1")
    sensor.publish("t/1", b"1")
    sensor.publish("t/1", b"2", 1, ContentType="text/plain", UserProperty=[("unit", "°C"), ("at", "a"), ("at", "b")])
    sensor.publish("t/2", b"3", 2, True, CorrelationData=b"\0\xff", ResponseTopic="r", MessageExpiryInterval=60)
    device.publish(topic, b"4")
    site.smq.publish(b"5", "t/1")
    wait_until(lambda: len(rows(tmp_path)) == 6, "all are recorded")
    found = {row.payload: row for row in rows(tmp_path)}
    assert [found[payload][-3:] for payload in (b"0", b"4", b"5")] == [(None, None, None)] * 3
    assert found[b"1"][-3:] == (0, False, "{}")
    assert (found[b"1"].uid, found[b"1"].topic, found[b"1"].flags) == ("mqtt:sensor", "t/1", 0)
    assert found[b"2"][-3:-1] == (1, False)
    assert json.loads(str(found[b"2"].properties)) == {"contenttype": "text/plain", "unit": "°C", "at": ["a", "b"]}
    assert (found[b"3"].qos, found[b"3"].retain, found[b"3"].flags) == (2, True, Flag.UNROUTED)
    third = {"correlationdata": "AP8=", "responsetopic": "r", "messageexpiryinterval": 60}
    assert json.loads(str(found[b"3"].properties)) == third
    assert properties_of(found[b"3"].properties) == third | {"correlationdata": b"\0\xff"}
    sql = "select payload, qos, retain, properties ->> 'unit' from messages where qos > 0 order by seq"
    assert queried(tmp_path, sql) == [(b"2", 1, False, "°C"), (b"3", 2, True, None)]


@pytest.mark.parametrize("sync", ["1s", "publish", "always"])
def test_messages_that_no_frame_holds(
    recorded_site: Callable[..., Site], connect: Callable[..., Sensor], tmp_path: Path, sync: str
) -> None:
    """They are in order among the others, reach handlers, and with `always` are delivered once they are on the disk."""
    site, handled = recorded_site(sync=sync), list[bytes]()
    site.smq.subscribe("t", onmsg=lambda data, *rest: handled.append(bytes(data)))
    sensor = connect(site, "sensor")
    payloads = [b"before", b"x" * 200_000, b"between", b"y" * 70_000, b"after"]
    for payload in payloads:
        sensor.publish("t", payload, 1, ContentType="text/plain")
    sensor.publish("nobody", b"z" * 66_000, 1, True)
    wait_until(lambda: handled == payloads, "the handler gets all")
    found = rows(tmp_path)
    assert [row.payload for row in found] == [*payloads, b"z" * 66_000]
    assert [row.seq for row in found] == list(range(6))
    assert [row.ts_us for row in found] == sorted(row.ts_us for row in found)
    assert {row[-3:] for row in found[:5]} == {(1, False, '{"contenttype":"text/plain"}')}
    assert {(row.topic, row.uid, row.flags) for row in found[:5]} == {("t", "mqtt:sensor", 0)}
    last = found[5]
    assert (last.topic, last.flags, *last[-3:]) == ("nobody", Flag.UNROUTED, 1, True, "{}")
    assert verify(tmp_path).faults == []


def test_only_selected_topics_are_recorded(
    recorded_site: Callable[..., Site], connect: Callable[..., Sensor], tmp_path: Path
) -> None:
    site = recorded_site(topics="t/#")
    sensor = connect(site, "sensor")
    for topic in ("t/1", "other"):
        sensor.publish(topic, b"small", 1)
        sensor.publish(topic, b"x" * 70_000, 1)
    assert [(row.topic, len(row.payload)) for row in rows(tmp_path)] == [("t/1", 5), ("t/1", 70_000)]
    (journal,) = writer.opened.values()
    assert journal.stats()["skipped"] == 2


def test_a_will(recorded_site: Callable[..., Site], connect: Callable[..., Sensor], tmp_path: Path) -> None:
    sensor = connect(recorded_site(), "sensor", topic="status", payload=b"lost", qos=1, retain=True)
    sensor.client.loop_stop()
    sensor.client.socket().close()
    wait_until(lambda: rows(tmp_path), "the will is recorded")
    (will,) = rows(tmp_path)
    assert (will.topic, will.payload, *will[-3:]) == ("status", b"lost", 1, True, "{}")


def test_a_full_disk(
    recorded_site: Callable[..., Site],
    connect: Callable[..., Sensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Publishers wait, and large messages stay between the others."""
    site, append, is_full = recorded_site(), segment.SegmentFile.append, [True]

    def refuse(self: Any, *arguments: Any) -> None:
        if is_full:
            raise OSError(28, "no space")
        append(self, *arguments)

    monkeypatch.setattr(segment.SegmentFile, "append", refuse)
    sensor, payloads = connect(site, "sensor"), [b"1", b"x" * 70_000, b"2", b"y" * 70_000, b"3"]
    sent = [sensor.client.publish("t", payload, 1) for payload in payloads[:3]]
    wait_until(lambda: next(iter(writer.opened.values())).stats()["stalls"], "a write fails")
    sent += [sensor.client.publish("t", payload, 1) for payload in payloads[3:]]
    wait_until(lambda: next(iter(writer.opened.values()))._recorder._waiting_outboxes, "the publisher waits")
    assert not sent[-1].is_published()
    is_full.clear()
    wait_until(lambda: all(one.is_published() for one in sent), "all are acknowledged", 20)
    assert [row.payload for row in rows(tmp_path)] == payloads
    assert {row[-3:] for row in rows(tmp_path)} == {(1, False, "{}")}


# ---- properties


def test_properties_as_json() -> None:
    properties = {"contenttype": "a/b", "correlationdata": b"\x01", "payloadformatindicator": 1, "k": ["1", "2"]}
    packed = pack_properties(properties, PacketType.PUBLISH)
    assert properties_json(NO_PROPERTIES) == "{}"
    assert properties_of(properties_json((packed, None))) == properties
    assert json.loads(properties_json((packed, 7)))["messageexpiryinterval"] == 7
    long = pack_properties({"k": ["v" * 1000] * (MAX_JSON_BYTES // 1000 + 1)}, PacketType.PUBLISH)
    assert json.loads(properties_json((long, None))) == {"omittedbytes": len(long)}
    assert properties_of('{"omittedbytes": 9}') == properties_of(None) == {}


@pytest.mark.parametrize(("limit", "most"), [("MAX_PROPERTIES", 5), ("MAX_PROPERTY_BYTES", 40)])
def test_many_different_properties(
    recorded_site: Callable[..., Site],
    connect: Callable[..., Sensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    most: int,
) -> None:
    monkeypatch.setattr(f"smqrt.journal.recorder.{limit}", most)
    sensor = connect(recorded_site(), "sensor")
    for number in range(40):
        sensor.publish("t", b"%d" % number, 1, UserProperty=("number", str(number % 13)))
    found = rows(tmp_path)
    assert [(row.payload, properties_of(row.properties)) for row in found] == [
        (b"%d" % number, {"number": str(number % 13)}) for number in range(40)
    ]


# ---- formats, compaction and tables


def mqtt_row(seq: int) -> Row:
    """A row whose message every third time is of an MQTT client."""
    row = written.row(seq)
    return row if seq % 3 else row._replace(**dict(MQTT))


def write_mqtt(journal: Path, first: int, end: int, step: int = 7) -> list[Row]:
    """Write a segment of format 2."""
    opened = segment.SegmentFile.open(journal / "wal/n1", first, "n1", "hub-n1", 2)
    for at in range(first, end, step):
        batch = [mqtt_row(seq) for seq in range(at, min(end, at + step))]
        times = [row.ts_us for row in batch]
        opened.append(arrow.encode(batch, arrow.WITH_MQTT), at, len(batch), min(times), max(times), 0)
    opened.close()
    return [mqtt_row(seq) for seq in range(first, end)]


def table(path: Path, columns: list[str] | None = None) -> Any:
    journal = Journal(path)
    chunks = [chunk for part in journal.plan({}, journal.end()) for chunk in part]
    return pa.Table.from_batches([batch for chunk in chunks for batch in journal.tables(chunk, columns)])


def test_hubs_without_mqtt_clients_write_format_1(tmp_path: Path) -> None:
    for options, format_ in (({}, "1"), ({"mqtt": True}, "2")):
        with hub.create(journal={"path": str(tmp_path)}, **options) as smq:
            smq.publish(b"1", "news")
        newest = segment.paths(tmp_path / "wal/n1")[-1].read_bytes()
        assert arrow.schema_metadata(newest[: arrow.message_size(newest[:8])]).get("format", "1") == format_
    found = rows(tmp_path)
    assert [row.payload for row in found] == [b"1", b"1"]
    assert table(tmp_path, ["qos", "payload"]).to_pydict() == {"qos": [None] * 2, "payload": [b"1"] * 2}


@pytest.mark.parametrize("kernels", ["fastest", "pure"])
def test_both_formats_in_a_folder(tmp_path: Path, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMQRT_KERNELS", kernels)
    monkeypatch.setattr("smqrt.journal.columns._threads", type("Threads", (), {})())
    written.write(tmp_path, [[9, 20]])
    wanted = [*written.rows(0, 20), *write_mqtt(tmp_path, 20, 50)]
    written.write(tmp_path, [[60]], first=50)
    wanted += written.rows(50, 60)
    segment.SegmentFile.open(tmp_path / "wal/n1", 60, "n1", "hub-n1", 2).close()
    assert rows(tmp_path) == wanted
    qos = [row.qos for row in wanted]
    assert table(tmp_path).column("qos").to_pylist() == qos
    assert table(tmp_path, ["retain"]).column("retain").to_pylist() == [row.retain for row in wanted]
    assert verify(tmp_path).faults == []
    compact.compact(tmp_path, EVERYTHING)
    (file,) = manifest.load(tmp_path).all_files()
    assert file.rows == 60
    assert rows(tmp_path) == wanted, "compaction keeps them"
    assert table(tmp_path).column("properties").to_pylist() == [row.properties for row in wanted]
    sql = "select seq, qos, retain, properties from {} where qos is not null order by seq"
    for view in ("messages", "compacted"):
        assert queried(tmp_path, sql.format(view)) == [(row.seq, *row[-3:]) for row in wanted if row.qos is not None]


def test_every_cut_of_a_segment(memory: Path) -> None:
    """As after a crash: the rows up to a whole batch are there, and the next ones follow."""
    wanted = write_mqtt(memory, 0, 12, step=5)
    path = segment.paths(memory / "wal/n1")[0]
    data, index = path.read_bytes(), path.with_suffix(".idx").read_bytes()
    ends = [entry.end for entry in segment.parse_index(index)]
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        path.with_suffix(".idx").write_bytes(index if size % 2 else b"")  # without an index it is rebuilt
        whole = sum(end <= size for end in ends)
        assert recovery.recover(path.parent).next_seq == min(12, 5 * whole)
        assert path.stat().st_size == (ends[whole - 1] if whole else path.stat().st_size)
        assert list(Journal(memory).rows({}, {"n1": min(12, 5 * whole)})) == wanted[: 5 * whole]


def test_a_damaged_schema_is_repaired(tmp_path: Path) -> None:
    wanted = write_mqtt(tmp_path, 0, 12)
    path = segment.paths(tmp_path / "wal/n1")[0]
    data = path.read_bytes()
    path.write_bytes(bytes(8) + data[8:])
    schemas = [arrow.schema_message("n1", "hub-n1", format_) for format_ in arrow.LAYOUTS]
    assert "beginning is damaged" in recovery.recover(path.parent, *schemas).faults[0]
    assert path.read_bytes() == data
    assert rows(tmp_path) == wanted


def test_flipped_bits_are_found(tmp_path: Path) -> None:
    write_mqtt(tmp_path, 0, 30)
    path, draw = segment.paths(tmp_path / "wal/n1")[0], random.Random(5)
    data = path.read_bytes()
    for _ in range(50):
        at = draw.randrange(len(arrow.schema_message("n1", "hub-n1", 2)), len(data))
        path.write_bytes(data[:at] + bytes((data[at] ^ 1 << draw.randrange(8),)) + data[at + 1 :])
        assert verify(tmp_path).faults


# ---- an older journal, see `test_old_journal`


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """Forty rows in two compacted files, twenty in two segments, all without the columns of MQTT."""
    with zipfile.ZipFile(Path(__file__).parent / "journal_of_version_1.zip") as archive:
        archive.extractall(tmp_path)
    return tmp_path


def test_an_older_journal_with_new_rows(older: Path) -> None:
    everywhere = "select count(*), count(qos), count(retain), count(properties) from {}"
    assert queried(older, everywhere.format("messages")) == [(60, 0, 0, 0)]
    assert queried(older, everywhere.format("compacted")) == [(40, 0, 0, 0)]
    write_mqtt(older, 60, 90)
    segment.SegmentFile.open(older / "wal/n1", 90, "n1", "hub-n1", 2).close()
    wanted = [*readings(60), *(mqtt_row(seq) for seq in range(60, 90))]
    assert rows(older) == wanted
    compact.compact(older, compact.CompactOptions(grace_s=0, merge_bytes=0))
    assert len(list(manifest.load(older).all_files())) > 2, "old and new files"
    assert rows(older) == wanted
    for view in ("messages", "compacted"):
        assert queried(older, everywhere.format(view)) == [(90, 10, 10, 10)]
    assert table(older).column("qos").to_pylist() == [row.qos for row in wanted]


def test_files_with_and_without_the_columns_are_merged(tmp_path: Path) -> None:
    """As they are when a hub is upgraded within an hour."""
    plain = [column.name for column in COLUMNS if column.name not in dict(MQTT)]
    with pytest.MonkeyPatch.context() as former:
        former.setattr(parquet_files, "COLUMNS", [column for column in COLUMNS if column.name in plain])
        whole = parquet_files.tables.schema
        former.setattr(parquet_files.tables, "schema", lambda columns=None: whole(columns or plain))
        written.write(tmp_path, [[10], [20], [21]])
        options = compact.CompactOptions(grace_s=0, merge_bytes=0, max_group_bytes=1)
        compact.compact(tmp_path, options)
    old = list(manifest.load(tmp_path).all_files())
    assert old
    assert parquet_files.plain_schema(tmp_path / old[0].path).names == plain
    wanted = [*written.rows(0, 21), *write_mqtt(tmp_path, 21, 40)]
    compact.compact(tmp_path, EVERYTHING)
    assert len(list(manifest.load(tmp_path).all_files())) == 1
    assert rows(tmp_path) == wanted


def test_delta_tables_get_the_columns(older: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    copy = tmp_path_factory.mktemp("lake") / "messages"
    schema = delta_table.table_schema(deltalake, None, [])
    fields = [field for field in schema.fields if field.name not in dict(MQTT)]
    copy.mkdir()
    delta_table.create_table(deltalake, copy, deltalake.Schema(fields))  # as an older version has created it
    delta_table.update_copy(older, str(copy))
    delta_table.update_table(older)
    write_mqtt(older, 60, 90)
    segment.SegmentFile.open(older / "wal/n1", 90, "n1", "hub-n1", 2).close()
    compact.compact(older, compact.CompactOptions(grace_s=0, merge_bytes=0, everything=True))
    delta_table.update_copy(older, str(copy))
    delta_table.update_table(older)
    for place in (copy, older / "data"):
        found = polars.read_delta(str(place)).sort("seq")
        assert found["qos"].to_list() == [None] * 60 + [mqtt_row(seq).qos for seq in range(60, 90)]
        assert found.filter(polars.col("retain"))["properties"].unique().to_list() == ['{"unit":"°C"}']
