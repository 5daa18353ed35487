"""Our Arrow batches are what pyarrow would have written, and come back as they were."""

from __future__ import annotations

import random
import struct
import zlib
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smqrt.errors import JournalError
from smqrt.journal import arrow
from smqrt.journal.arrow import PLAIN, WITH_MQTT
from smqrt.journal.record import COLUMNS, DDL, SEGMENT_COLUMNS, Row
from tests.journal import written

INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.none() | st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
ID = st.none() | st.integers(0, 2**32 - 1)
ROW = st.tuples(
    INT64, INT64, TEXT, ID, TEXT, ID, ID, TEXT, st.integers(-(2**31), 2**31 - 1), st.binary(max_size=40), TEXT
)
ROWS = st.lists(ROW.map(lambda values: Row(*values)), min_size=1, max_size=30)
MQTT = st.tuples(st.integers(0, 2), st.booleans(), st.text(st.characters(exclude_categories=("Cs",)), max_size=20))
MQTT_ROWS = st.lists(
    st.tuples(ROW, MQTT | st.just((None, None, None))).map(lambda pair: Row(*pair[0], *pair[1])),
    min_size=1,
    max_size=30,
)
SCHEMA = pa.schema(
    [
        pa.field("seq", pa.int64(), False),
        pa.field("ts", pa.timestamp("us", "UTC"), False),
        pa.field("topic", pa.string()),
        pa.field("tid", pa.int64()),
        pa.field("subtopic", pa.string()),
        pa.field("stid", pa.int64()),
        pa.field("ptid", pa.int64()),
        pa.field("uid", pa.string()),
        pa.field("flags", pa.int32(), False),
        pa.field("payload", pa.binary(), False),
        pa.field("txn", pa.string()),
    ]
)


def encoded(rows: list[Row]) -> bytes:
    return b"".join(arrow.encode(rows))


def by_pyarrow(rows: list[Row], schema: pa.Schema = SCHEMA) -> Any:
    columns = list(zip(*rows, strict=True))[: len(schema)]
    return pa.table(
        [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
    )


MQTT_SCHEMA = pa.schema(
    [*SCHEMA, pa.field("qos", pa.int32()), pa.field("retain", pa.bool_()), pa.field("properties", pa.string())]
)


@settings(max_examples=40)
@given(st.lists(MQTT_ROWS, min_size=1, max_size=3))
def test_format_2_has_the_columns_of_mqtt(batches: list[list[Row]]) -> None:
    made = [b"".join(arrow.encode(batch, WITH_MQTT)) for batch in batches]
    assert [arrow.decode(batch) for batch in made] == batches
    head = arrow.schema_message("n1", "hub", 2)
    assert arrow.schema_metadata(head) == {"node": "n1", "broker": "hub", "format": "2"}
    table = pa.ipc.open_stream(head + b"".join(made)).read_all()
    table.validate(full=True)
    assert table.schema.equals(MQTT_SCHEMA)
    assert table.equals(by_pyarrow([row for batch in batches for row in batch], MQTT_SCHEMA))


@settings(max_examples=40)
@given(MQTT_ROWS)
def test_format_1_lacks_the_columns_of_mqtt(rows: list[Row]) -> None:
    batch = encoded(rows)
    assert arrow.layout_of(batch) is PLAIN
    assert arrow.decode(batch) == [Row(*row[:11]) for row in rows]
    assert arrow.decode_column(batch, "retain") == [None] * len(rows)


@settings(max_examples=40)
@given(st.lists(ROWS, min_size=1, max_size=3))
def test_the_stream_is_pyarrows_table(batches: list[list[Row]]) -> None:
    stream = arrow.schema_message("n1", "hub") + b"".join(map(encoded, batches))
    table = pa.ipc.open_stream(stream).read_all()
    table.validate(full=True)
    assert table.schema.equals(SCHEMA)
    assert table.equals(by_pyarrow([row for batch in batches for row in batch]))


@settings(max_examples=40)
@given(ROWS)
def test_rows_come_back(rows: list[Row]) -> None:
    assert arrow.decode(encoded(rows)) == rows
    assert arrow.decode(memoryview(b"12345" + encoded(rows))[5:]) == rows


@settings(max_examples=40)
@given(ROWS)
def test_columns_come_back(rows: list[Row]) -> None:
    batch = encoded(rows)
    for at, name in enumerate(Row._fields):
        column = "ts" if name == "ts_us" else name
        assert arrow.decode_column(batch, column) == [row[at] for row in rows]


@settings(max_examples=40)
@given(ROWS)
def test_a_column_says_how_many_nulls_it_has(rows: list[Row]) -> None:
    header = arrow.read_header(encoded(rows))
    assert header.rows == len(rows)
    assert list(header.nulls) == [column.count(None) for column in zip(*rows, strict=True)][: PLAIN.fields]


@given(st.text(max_size=60), st.text(max_size=60))
def test_the_schema_names_the_writer(node: str, broker: str) -> None:
    node, broker = (text.encode("utf-8", "replace").decode() for text in (node, broker))
    message = arrow.schema_message(node, broker)
    assert arrow.schema_metadata(message) == {"node": node, "broker": broker}
    assert pa.ipc.open_stream(message).schema.metadata == {b"node": node.encode(), b"broker": broker.encode()}
    assert len(message) == arrow.message_size(message) % 2**32
    assert len(message) % 8 == 0


def test_text_that_is_no_unicode_is_replaced() -> None:
    row = written.row(0)._replace(topic="a\ud800b", uid="ascii")
    assert arrow.decode(encoded([row]))[0].topic == "a?b"


def test_bytes_that_are_no_utf8_are_replaced() -> None:
    batch = encoded([written.row(0)._replace(topic="abc")])
    at = batch.index(b"abc")
    assert arrow.decode(batch[:at] + b"\xffbc" + batch[at + 3 :])[0].topic == "\ufffdbc"


def test_a_batch_with_a_validity_for_columns_without_nulls() -> None:
    """What the kernel of the hub's writer may do: every nullable column has its bitmap."""
    rows = written.rows(0, 9)
    pieces = arrow.encode(rows)
    header, batch = arrow.read_header(b"".join(pieces)), b"".join(pieces)
    body = batch[PLAIN.header_bytes :]
    buffers = [body[at : at + size] for at, size in header.buffers]
    uid = 2 + 2 + 3 + 2 + 3 + 2 + 2
    assert header.nulls[7] == 0
    buffers[uid] = b"\xff\x01"
    made = PLAIN.header(9, header.nulls, [len(one) for one in buffers])
    made += b"".join(one + bytes(-len(one) % 8) for one in buffers)
    assert arrow.decode(made) == rows
    assert pa.ipc.open_stream(arrow.schema_message("n", "b") + made).read_all().equals(by_pyarrow(rows))


def test_a_header_has_always_the_same_size() -> None:
    headers = [encoded(written.rows(0, count))[: PLAIN.header_bytes] for count in (1, 64, 1000)]
    assert PLAIN.header_bytes % 8 == 0
    assert [arrow.message_size(header) for header in headers] == [PLAIN.header_bytes] * 3


@pytest.mark.parametrize(("nulls", "lengths"), [((0,) * 10, (0,) * 27), ((0,) * 11, (0,) * 26)])
def test_a_header_of_other_columns_is_an_error(nulls: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    with pytest.raises((struct.error, ValueError)):
        PLAIN.header(1, nulls, lengths)


def test_what_is_cut_off_is_no_batch() -> None:
    batch = encoded(written.rows(0, 20))
    for size in range(0, len(batch), 37):
        with pytest.raises(JournalError, match="not a batch of a journal"):
            arrow.decode(batch[:size])


def test_damage_never_is_another_exception() -> None:
    rows, random_ = written.rows(0, 20), random.Random(4)
    batch = encoded(rows)
    for _ in range(1500):
        damaged = bytearray(batch)
        damaged[random_.randrange(len(batch))] ^= 1 << random_.randrange(8)
        with suppress(JournalError):
            arrow.decode(damaged)


@pytest.mark.parametrize(
    "message",
    [b"", b"1234567", b"\xff" * 8, arrow.schema_message("n", "b")[:60], b"\xff" * 4 + b"\x08\0\0\0" + b"\xff" * 8],
)
def test_what_is_no_schema(message: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        arrow.schema_metadata(message)


def test_spark_sees_node_and_broker_as_columns() -> None:
    assert [one.name for one in COLUMNS][:5] == ["node", "seq", "ts", "broker", "topic"]
    assert [one for one in COLUMNS if one.name not in ("node", "broker")] == list(SEGMENT_COLUMNS)
    assert DDL.startswith("node STRING NOT NULL, seq BIGINT NOT NULL, ts TIMESTAMP NOT NULL, broker STRING, topic")


def test_bytes_of_segments_stay_the_same() -> None:
    """A damaged schema is repaired from the bytes that this release writes."""
    schemas = [arrow.schema_message(*names) for names in (("n1", "hub"), ("node-2", "größe"))]
    batch = encoded(written.rows(0, 64))
    assert [len(data) for data in (*schemas, batch)] == [968, 984, 6920]
    assert [zlib.crc32(data) for data in (*schemas, batch)] == [3042601463, 1739040181, 3574414282]
    assert PLAIN.header_bytes == 712
    mqtt = arrow.schema_message("n1", "hub", 2), b"".join(arrow.encode(written.rows(0, 64), WITH_MQTT))
    assert [(len(data), zlib.crc32(data)) for data in mqtt] == [(1224, 1390354662), (7080, 4048965667)]
    assert WITH_MQTT.header_bytes == 872


def with_format(number: str) -> bytes:
    """A schema that names its format."""
    message = arrow.schema_message("format", number)
    at = message.index(b"broker\0")
    return message[:at] + b"format\0" + message[at + 7 :]


def test_a_newer_format_is_refused() -> None:
    assert arrow.schema_metadata(with_format("1"))["format"] == "1"
    assert arrow.schema_metadata(with_format("x"))["format"] == "x"
    with pytest.raises(JournalError, match="has format 3, written by a newer smqrt; this one reads up to 2"):
        arrow.schema_metadata(with_format("3"))


def test_a_message_begins_with_its_mark_and_size() -> None:
    assert arrow.message_size(b"\xff\xff\xff\xff\x08\0\0\0") == 16
    assert arrow.message_size(b"\xff\xff\xff\xff\x10\0\0\0more") == 24
    for wrong in (b"\xff\xff\xff\xff\x07\0\0\0", b"\xff" * 4 + bytes(4), b"\xff" * 8, bytes(8), b"\xff" * 7):
        with pytest.raises(ValueError, match="no Arrow message"):
            arrow.message_size(wrong)


def test_a_header_that_contradicts_itself_is_refused() -> None:
    nulls, lengths = (0,) * PLAIN.fields, (8,) * PLAIN.buffers
    header = arrow.read_header(PLAIN.header(1, nulls, lengths))
    assert (header.rows, header.nulls, header.body_bytes) == (1, nulls, 8 * PLAIN.buffers)
    assert header.buffers == [(8 * at, 8) for at in range(PLAIN.buffers)]
    assert arrow.read_header(PLAIN.header(0, nulls, (0,) * PLAIN.buffers)).body_bytes == 0
    (body, rows, _, buffers), _ = PLAIN.header_layout()
    for at, value in ((rows, -1), (body, 8 * PLAIN.buffers - 1), (buffers, -1), (buffers + 8, 10_000)):
        damaged = bytearray(PLAIN.header(1, nulls, lengths))
        struct.pack_into("<q", damaged, at, value)
        with pytest.raises(ValueError, match="is inconsistent"):
            arrow.read_header(damaged)
    with pytest.raises(ValueError, match="711 bytes are too few"):
        arrow.read_header(PLAIN.header(1, nulls, lengths)[:-1])


def test_lengths_are_padded_to_eight_bytes() -> None:
    lengths = (1, 8, 9, *(0,) * (PLAIN.buffers - 3))
    header = arrow.read_header(PLAIN.header(1, (0,) * PLAIN.fields, lengths))
    assert header.buffers[:4] == [(0, 1), (8, 8), (16, 9), (32, 0)]
    assert header.body_bytes == 32


def test_the_layout_gives_every_byte_of_a_header() -> None:
    numbers, parts = PLAIN.header_layout()
    header = PLAIN.header(7, (0,) * PLAIN.fields, (8,) * PLAIN.buffers)
    assert all(header[at : at + len(part)] == part for at, part in parts)
    assert struct.unpack_from("<q", header, numbers[0])[0] == 8 * PLAIN.buffers
    assert struct.unpack_from("<q", header, numbers[1])[0] == 7
    assert sum(len(part) for _, part in parts) + 16 + 16 * (PLAIN.fields + PLAIN.buffers) == PLAIN.header_bytes
    assert (PLAIN.fields, PLAIN.buffers, PLAIN.first_buffer[:4]) == (11, 27, [0, 2, 4, 7])
