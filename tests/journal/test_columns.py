"""The LuaJIT columns make the same batches as the Python ones, which are made of rows one by one."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smqrt.journal import arrow, columns
from smqrt.journal.arrow import PLAIN, WITH_MQTT
from smqrt.journal.columns import (
    LARGE,
    LARGE_MESSAGE,
    MAX_ROWS,
    MAX_TEXT_BYTES,
    NO_ATTRIBUTES,
    PROPERTIES,
    SUBTOPIC,
    TOPIC,
    UID,
    Columns,
    JitColumns,
    PureColumns,
    attributes,
    stamp,
    toggle,
)
from smqrt.journal.record import Row
from smqrt.wire import smq

SERVER = 1
NAMES = {
    (TOPIC, 5): b"site/5",
    (TOPIC, 0xFFFFFFF0): "größe".encode(),
    (SUBTOPIC, 9): b"sub",
    (UID, 0x81234567): b"uid-x",
    (PROPERTIES, 1): b"{}",
    (PROPERTIES, 2): '{"größe":"1"}'.encode(),
}
IDS = st.sampled_from([5, 0xFFFFFFF0, 77, 0x81234567, 0x7FFFFFFF])
ADDRESSES = IDS, st.sampled_from([0x81234567, SERVER, 0x80000000]), st.sampled_from([0, 9, 10])
FRAMES = st.builds(smq.publish_frame, *ADDRESSES, st.binary(max_size=40))
RUNS = st.builds(
    lambda tid, ptid, stid, payloads: b"".join(smq.publish_frame(tid, ptid, stid, one) for one in payloads),
    *ADDRESSES,
    st.lists(st.binary(max_size=40), min_size=2, max_size=20),
)
TIMES = st.integers(1_600_000_000_000_000, 1_900_000_000_000_000)
MARKS = st.one_of(TIMES.map(stamp), st.sampled_from([2, 4]).map(toggle))
STREAM = st.lists(st.one_of(FRAMES, FRAMES, RUNS, MARKS), max_size=60)
ATTRIBUTES = st.builds(attributes, st.integers(0, 2), st.booleans(), st.integers(0, 2))
MQTT_STREAM = st.lists(st.one_of(FRAMES, RUNS, RUNS, MARKS, ATTRIBUTES, ATTRIBUTES), max_size=60)


def rows(of: Columns, data: bytes, seq: int = 7) -> list[list[Row]]:
    """The batches that `data` makes, decoded."""
    of.server(SERVER)
    batches, at = [], 0
    while at < len(data):
        at, kind, number = of.append(data, at)
        if kind:
            of.name(kind, number, NAMES.get((kind, number)))
            continue
        count, first_us, last_us, pieces = of.take(seq)
        batch = arrow.decode(b"".join(pieces)) if count else []
        assert len(batch) == count
        assert not batch or (first_us, last_us) == (min(one.ts_us for one in batch), max(one.ts_us for one in batch))
        batches.append(batch)
        seq += count
    return batches


@settings(max_examples=100)
@given(STREAM, TIMES)
def test_twins(stream: list[bytes], end_us: int) -> None:
    data = b"".join([*stream, stamp(end_us)])
    assert rows(JitColumns(), data) == rows(PureColumns(), data)


@settings(max_examples=100)
@given(MQTT_STREAM, TIMES)
def test_twins_with_mqtt(stream: list[bytes], end_us: int) -> None:
    data = b"".join([*stream, stamp(end_us)])
    found = rows(JitColumns(WITH_MQTT), data)
    assert found == rows(PureColumns(WITH_MQTT), data)
    if all(one[2] != 2 for one in stream):
        assert found == rows(JitColumns(), data)


def test_the_attributes_of_mqtt_are_those_of_the_messages_after_them() -> None:
    frame, ends = smq.publish_frame(5, 0x81234567, 0, b"x"), [NO_ATTRIBUTES, stamp(1)]
    first, second = attributes(0, False, 1), attributes(2, True, 2)
    for of in (JitColumns(WITH_MQTT), PureColumns(WITH_MQTT)):
        [found] = rows(of, b"".join([frame, first, frame, frame, second, frame, *ends, frame * 9, stamp(2)]))
        mqtt = [(None, None, None), *[(0, False, "{}")] * 2, (2, True, '{"größe":"1"}'), *[(None, None, None)] * 9]
        assert [row[-3:] for row in found] == mqtt
        [later] = rows(of, frame * 20 + stamp(3))
        assert {row[-3:] for row in later} == {(None, None, None)}, "the next batch begins without any"
        [again] = rows(of, first + frame + NO_ATTRIBUTES + frame * 5 + stamp(4))
        assert [row[-3:] for row in again] == [(0, False, "{}"), *[(None, None, None)] * 5]


def test_rows_of_other_clients_need_no_more_space() -> None:
    data, sizes = smq.publish_frame(5, 0x81234567, 0, b"x") * 1000 + stamp(1), {}
    for layout in (PLAIN, WITH_MQTT):
        of = JitColumns(layout)
        of.server(SERVER)
        at = 0
        while at < len(data):
            at, kind, number = of.append(data, at)
            if kind:
                of.name(kind, number, NAMES.get((kind, number)))
        batch = b"".join(of.take(0)[3])
        sizes[layout] = len(batch) - layout.header_bytes
        if layout is WITH_MQTT:
            table = pa.ipc.open_stream(arrow.schema_message("n1", "hub", 2) + batch).read_all()
            table.validate(full=True)
            assert [table.column(name).null_count for name in ("qos", "retain", "properties")] == [1000] * 3
            assert table.column("qos").fill_null(7).to_pylist() == [7] * 1000
    assert sizes[PLAIN] == sizes[WITH_MQTT]


def test_long_properties_divide_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NAMES, (PROPERTIES, 1), b"p" * 1000)
    run = smq.publish_frame(5, 0x81234567, 0, b"x") * 1200
    data = attributes(1, False, 1) + run + NO_ATTRIBUTES + run + stamp(1)
    found = [rows(of, data) for of in (JitColumns(WITH_MQTT), PureColumns(WITH_MQTT))]
    assert [len(batch) for batch in found[0]][:2] == [MAX_TEXT_BYTES // 1000] * 2
    flat = [[row for batch in batches for row in batch] for batches in found]
    assert flat[0] == flat[1]


def test_a_large_message_ends_the_batch() -> None:
    frame = smq.publish_frame(5, 0x81234567, 0, b"x")
    for of in (JitColumns(WITH_MQTT), PureColumns(WITH_MQTT)):
        of.server(SERVER)
        for kind in (TOPIC, UID):
            of.name(kind, {TOPIC: 5, UID: 0x81234567}[kind], b"name")
        data = frame + stamp(1) + LARGE + frame
        at, kind, _ = of.append(data, 0)
        assert (data[at:], kind) == (LARGE + frame, LARGE_MESSAGE)
        assert of.take(0)[0] == 1
        assert of.append(data, at + len(LARGE)) == (len(data), 0, 0)


def test_a_full_batch_takes_the_time_that_comes_later() -> None:
    frame = smq.publish_frame(5, 0x81234567, 0, b"x")
    data = frame * (MAX_ROWS + 3) + stamp(1_700_000_000_000_000) + frame + stamp(1_700_000_000_000_009)
    for of in (JitColumns(), PureColumns()):
        batches = rows(of, data)
        assert [len(batch) for batch in batches] == [MAX_ROWS, 4]
        times = [row.ts_us for batch in batches for row in batch]
        assert times == [1_700_000_000_000_000] * (MAX_ROWS + 3) + [1_700_000_000_000_009]
        assert [row.seq for batch in batches for row in batch] == list(range(7, 7 + MAX_ROWS + 4))


def test_a_batch_of_much_payload_is_divided() -> None:
    frames = [smq.publish_frame(5, 0x81234567, 9, bytes([at]) * smq.MAX_PAYLOAD_BYTES) for at in range(40)]
    for of in (JitColumns(), PureColumns()):
        batches = rows(of, b"".join([*frames, stamp(1)]))
        assert len(batches) > 2
        assert [row.payload[0] for batch in batches for row in batch] == list(range(40))


def test_a_batch_of_long_names_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NAMES, (TOPIC, 5), b"n" * 1000)
    run = smq.publish_frame(5, 0x81234567, 0, b"x") * 1200
    single = smq.publish_frame(77, 0x81234567, 0, b"y")
    batches = rows(JitColumns(), run + single + run + stamp(1))
    full = MAX_TEXT_BYTES // 1000
    assert [len(batch) for batch in batches] == [full, full, full + 1, full, 2400 - 4 * full]
    assert [row for batch in batches for row in batch] == [
        row for batch in rows(PureColumns(), run + single + run + stamp(1)) for row in batch
    ]


@pytest.mark.parametrize(("limit_frames", "more_bytes", "frames"), [(3, 0, 3), (3, 1, 4)])
def test_every_batch_ends_at_the_same_size(
    limit_frames: int, more_bytes: int, frames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = smq.publish_frame(5, 0x81234567, 0, b"payload")
    monkeypatch.setattr(columns, "MAX_BATCH_BYTES", limit_frames * len(frame) + more_bytes)
    assert [len(batch) for batch in rows(PureColumns(), frame * frames * 3 + stamp(1))] == [frames] * 3


@pytest.mark.parametrize("make", [JitColumns, PureColumns])
def test_a_time_without_rows_is_no_batch(make: type[Columns]) -> None:
    of = make()
    for _ in range(2):
        assert rows(of, stamp(1_700_000_000_000_000)) == [[]]


def test_flags() -> None:
    parts = [(5, SERVER, b"s"), (77, 0x81234567, b"d"), (5, 0x81234567, b"n")]
    sent = [smq.publish_frame(tid, ptid, 0, payload) for tid, ptid, payload in parts]
    data = b"".join([*sent, toggle(2), sent[2], toggle(4), sent[2], toggle(2), toggle(4), sent[2], stamp(1)])
    [batch] = rows(JitColumns(), data)
    assert [row.flags for row in batch] == [16, 1, 0, 2, 6, 0]
    assert [row.topic for row in batch[:3]] == ["site/5", None, "site/5"]
    assert [row.uid for row in batch[:3]] == [None, "uid-x", "uid-x"]
