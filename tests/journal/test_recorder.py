"""Runs of many kilobytes become rows where they lie; all rows come in the order in which they were recorded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from smqrt.broker.mqtt.messages import MqttBatch, mqtt_batch
from smqrt.journal import arrow, recorder, settings
from smqrt.journal.arrow import PLAIN, WITH_MQTT
from smqrt.journal.columns import MAX_ROWS
from smqrt.journal.record import Flag, Row
from smqrt.smq import data_path
from smqrt.wire import smq

NOW_US = 1_700_000_000_000_000


class CountedClock:
    """A time that stands still, and how often it was read."""

    def __init__(self) -> None:
        self.us, self.reads = NOW_US, 0

    def read(self) -> int:
        self.reads += 1
        return self.us


class Disk:
    """Takes the batches of a recorder, when it is not full."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.room_rows = 1 << 30
        self.stuck: list[bytes] = []

    def write(self, rows: int, first_us: int, last_us: int, pieces: Any) -> bool:
        batch = b"".join(bytes(piece) for piece in pieces)
        if rows > self.room_rows:
            self.stuck.append(batch)
            return False
        self.room_rows -= rows
        self.rows += arrow.decode(batch)
        return True


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture(params=["quickest", "pure"])
def recording(request: Any, disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A recorder, and the time it is given."""
    if request.param == "pure":
        monkeypatch.setenv("SMQRT_KERNELS", "pure")
    client = SimpleNamespace(uid=b"client")
    topic = SimpleNamespace(name=b"topic")
    broker: Any = SimpleNamespace(
        server=SimpleNamespace(etid=1, uid=b"server", outbox=SimpleNamespace(resume=lambda: None)),
        sessions={2: client},
        topic_table=SimpleNamespace(get=lambda number: topics[-1] if topics else None),
        subtopic_table=SimpleNamespace(by_id={}),
        record=lambda ended: None,
        clock=lambda: 0.0,
    )
    clock, topics = CountedClock(), [topic]
    asked = settings.parse({"path": str(tmp_path)}, tmp_path)
    layout = WITH_MQTT if "mqtt_recording" in request.fixturenames else PLAIN
    made = recorder.HubRecorder(broker, asked, lambda: len(disk.rows) + 1, disk.write, clock.read, lambda: None, layout)
    given = SimpleNamespace(recorder=made, clock=clock, server=broker.server, topics=topics, is_closed=False)
    yield given
    made.full = False
    if not given.is_closed:
        made.close()


@pytest.fixture
def mqtt_recording(recording: Any) -> Any:
    """The recorder of a hub that accepts MQTT clients."""
    return recording


def run(first: int, count: int) -> bytes:
    return b"".join(smq.publish_frame(5, 2, 0, b"%d" % number) for number in range(first, first + count))


def receive(recording: Any, first: int, count: int) -> None:
    """Records a run from a buffer that is used for something else afterwards."""
    buffer = bytearray(run(first, count))
    recording.recorder.record_large(memoryview(buffer))
    buffer[:] = bytes(len(buffer))


def numbers(disk: Disk) -> list[int]:
    return [int(cast("bytes", row.payload)) for row in disk.rows]


def test_long_and_short_runs_keep_their_order_and_times(recording: Any, disk: Disk) -> None:
    of = recording.recorder
    of.record(run(0, 2))
    receive(recording, 2, 500)
    of.record_unrouted(run(502, 1))
    of._end_turn()
    recording.clock.us += 7
    receive(recording, 503, 500)
    of._end_turn()
    of.flush()
    assert numbers(disk) == list(range(1003))
    assert [row.ts_us for row in disk.rows] == [NOW_US] * 503 + [NOW_US + 7] * 500
    assert [row.flags for row in disk.rows if row.flags] == [Flag.UNROUTED]
    assert {row.uid for row in disk.rows} == {"client"}


def large(payload: bytes) -> MqttBatch:
    batch = mqtt_batch(smq.publish_frame(5, 2, 0, b""), 1)
    batch.large = payload
    return batch


def test_a_large_message_of_an_mqtt_client_is_between_the_others_of_its_turn(mqtt_recording: Any, disk: Disk) -> None:
    of = mqtt_recording.recorder
    record = of.record_of(mqtt_recording.server)  # which publishes wills
    record(run(0, 2))
    mqtt_recording.clock.us += 3
    record(large(b"2"))
    record(large(b"3"))
    assert of.waiting() == 4
    mqtt_recording.clock.us += 4
    record(mqtt_batch(run(4, 1), 2, True))
    of.record_unrouted(large(b"5"))
    record(run(6, 1))
    of._end_turn()
    of.flush()
    assert numbers(disk) == list(range(7))
    assert [row.ts_us - NOW_US for row in disk.rows] == [3, 3, 3, 3, 7, 7, 7]
    assert [row.qos for row in disk.rows] == [None, None, 1, 1, 2, 1, None]
    assert [row.flags for row in disk.rows] == [0, 0, 0, 0, 0, Flag.UNROUTED, 0]


def test_large_messages_wait_for_a_full_disk(mqtt_recording: Any, disk: Disk) -> None:
    of, disk.room_rows = mqtt_recording.recorder, 0
    record = of.record_of(mqtt_recording.server)
    record(run(0, 1))
    of.flush()
    assert of.full
    record(large(b"1"))
    record(run(2, 1))
    record(large(b"3"))
    of._end_turn()
    of.flush()
    assert (numbers(disk), of.waiting()) == ([], 3)
    disk.room_rows = 100
    disk.rows += arrow.decode(disk.stuck.pop())  # the writer writes it first
    of.resume()
    assert numbers(disk) == list(range(4))


def test_a_run_is_stamped_when_it_fills_a_batch(recording: Any, disk: Disk) -> None:
    receive(recording, 0, MAX_ROWS + 3)
    assert [row.ts_us for row in disk.rows] == [NOW_US] * MAX_ROWS
    recording.recorder.flush()
    assert numbers(disk) == list(range(MAX_ROWS + 3))


def test_what_a_full_disk_does_not_take_is_kept(recording: Any, disk: Disk) -> None:
    disk.room_rows = MAX_ROWS
    receive(recording, 0, 3 * MAX_ROWS)
    receive(recording, 3 * MAX_ROWS, 10)
    assert recording.recorder.full
    assert len(disk.rows) == MAX_ROWS
    disk.room_rows = 1 << 30
    [stuck] = disk.stuck
    disk.rows += arrow.decode(stuck)  # as the writer does before it tells
    recording.recorder.resume()
    assert numbers(disk) == list(range(3 * MAX_ROWS + 10))


def test_read_only_buffers_are_accepted(recording: Any, disk: Disk) -> None:
    recording.recorder.record_large(memoryview(run(0, 100)))
    recording.recorder.flush()
    assert numbers(disk) == list(range(100))


def test_a_quiet_recorder_does_not_read_the_clock(recording: Any, disk: Disk) -> None:
    of = recording.recorder
    of.record(run(0, 2))
    of.flush()
    reads = recording.clock.reads
    for _ in range(3):
        of.flush()
    assert recording.clock.reads == reads
    assert numbers(disk) == [0, 1]


def test_waiting_messages_are_counted(recording: Any, disk: Disk) -> None:
    of = recording.recorder
    assert of.waiting() == 0
    of.record(run(0, 2))
    of.record_unrouted(run(2, 3))
    assert of.waiting() == 5
    of.flush()
    assert of.waiting() == 0
    assert [row.flags for row in disk.rows] == [0, 0, 2, 2, 2]


def test_messages_that_are_not_selected_are_counted(recording: Any) -> None:
    of = recording.recorder
    of.skipped(run(0, 1))
    assert of.messages_skipped == 1
    of.skipped(run(0, 1000))
    assert of.messages_skipped == 1001


def test_assembled_messages_have_their_flag(recording: Any, disk: Disk) -> None:
    of = recording.recorder
    delivered: list[bytes] = []

    def deliver(frames: bytes) -> bool:
        delivered.append(frames)
        of.record(frames)
        return True

    assert of.record_assembled(deliver, run(0, 1))
    of.record(run(1, 1))
    with pytest.raises(ZeroDivisionError):
        of.record_assembled(lambda _: 1 // 0 == 0, run(2, 1))
    of.record(run(3, 1))
    of.flush()
    assert delivered == [run(0, 1)]
    assert [(row.flags, row.payload) for row in disk.rows] == [(Flag.ASSEMBLED, b"0"), (0, b"1"), (0, b"3")]


def test_messages_wait_for_their_rows_on_the_disk(recording: Any, disk: Disk) -> None:
    of, sent = recording.recorder, list[bytes]()
    resumed: list[str] = []
    publisher: Any = SimpleNamespace(outbox=SimpleNamespace(resume=lambda: resumed.append("client")))

    def deliver(frames: bytes) -> bool:
        sent.append(frames)
        return frames == b"second"

    assert of.send_later(deliver, b"first", publisher)
    of.record(run(0, 2))
    of.flush()
    assert of.send_later(deliver, b"second", publisher)
    of.on_synced(0)
    assert sent == []
    of.on_synced(1)
    assert (sent, resumed) == ([b"first"], ["client"])
    of.on_synced(2)
    assert sent == [b"first"]
    of.on_synced(3)
    assert (sent, resumed) == ([b"first", b"second"], ["client"]), "the second one waits for its receiver"


def test_an_error_of_one_message_stops_no_other(recording: Any, caplog: pytest.LogCaptureFixture) -> None:
    of, sent = recording.recorder, list[bytes]()
    resumed: list[int] = []
    publisher: Any = SimpleNamespace(outbox=SimpleNamespace(resume=lambda: resumed.append(1)))
    of.send_later(lambda _: 1 // 0 == 0, b"first", publisher)
    of.send_later(lambda frames: sent.append(frames), b"second", publisher)
    of.on_synced(1)
    assert (sent, resumed) == ([b"second"], [1, 1])
    assert "error while a message was routed" in caplog.text


def test_the_server_waits_above_a_limit_of_bytes(recording: Any, disk: Disk) -> None:
    of = recording.recorder
    server = recording.server
    assert not of.send_later(lambda _: None, bytes(recorder.MAX_SERVER_UNSENT_BYTES), server)
    assert of.send_later(lambda _: None, b"x", server)
    of.on_synced(1)
    assert not of.send_later(lambda _: None, b"x", server)


def test_the_server_may_wait_for_16_mib() -> None:
    """help: journal"""
    assert recorder.MAX_SERVER_UNSENT_BYTES == 16 * 1024 * 1024


def test_an_unknown_topic_is_asked_for_again(recording: Any, disk: Disk) -> None:
    of, topics = recording.recorder, recording.topics
    topics.clear()
    for _ in range(2):
        of.record(run(0, 1))
        of.flush()
    topics.append(SimpleNamespace(name=b"late"))
    of.record(run(1, 1))
    of.flush()
    assert [(row.topic, row.flags) for row in disk.rows] == [(None, 1), (None, 1), ("late", 0)]


def test_a_client_that_left_keeps_its_name_once(recording: Any, disk: Disk) -> None:
    of = recording.recorder
    of.record(smq.publish_frame(5, 3, 0, b"1"))
    of.left(SimpleNamespace(etid=3, uid=b"gone"))
    of.flush()
    of.record(smq.publish_frame(5, 3, 0, b"2") + smq.publish_frame(5, 1, 0, b"3"))
    of.flush()
    assert [row.uid for row in disk.rows] == ["gone", None, "server"]


def test_turns_of_the_data_path_leave_a_closed_recorder(recording: Any, disk: Disk) -> None:
    recording.recorder.record(run(0, 2))
    recording.recorder.close()
    recording.is_closed = True
    assert numbers(disk) == [0, 1]
    recording.recorder.record(run(2, 1))  # then the clock would be read at the end of a turn
    reads = recording.clock.reads
    for end_turn in list(data_path.turn_ends):
        end_turn()
    assert recording.clock.reads == reads
