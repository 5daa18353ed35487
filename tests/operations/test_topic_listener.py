"""Live views of hubs: messages of topics at this and at other workers, and traces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gevent
import pytest

from smqrt import hub
from smqrt.errors import ArgumentError
from smqrt.operations import topic_listener
from smqrt.operations.topic_listener import (
    MAX_KEPT,
    MAX_TRACES,
    TRACES,
    LocalPeerListener,
    LocalTopicListener,
    RemoteListener,
    serve_topic_listener,
    start_trace,
)
from smqrt.smq.gevent_broker import GeventBroker, all_brokers
from smqrt.workers.worker_rpc import END
from tests.support.waiting import let_others_run, wait_until


def test_messages_are_shown_and_many_are_counted(smq: Any, broker: GeventBroker) -> None:
    listening = LocalTopicListener(broker, ["lamp", "lamp", "door"], clock=lambda: 5.0)
    smq.publish("on\x1b", "lamp", "kitchen")
    smq.publish(b"x" * 2000, "door")
    let_others_run()
    (first, second), missed = listening.take()
    assert missed == 0
    assert first | {"from": 1} == {
        "number": 1, "at_s": 5.0, "topic": "lamp", "subtopic": "kitchen", "from": 1, "size_bytes": 3, "text": "on\\x1b",
        "cut": False,
    }  # fmt: skip
    assert (second["topic"], len(str(second["text"])), second["cut"]) == ("door", 512, True)
    for number in range(MAX_KEPT + 15):
        smq.publish(str(number), "lamp")
    let_others_run()
    messages, missed = listening.take()
    assert ([one["text"] for one in messages], missed) == ([str(number) for number in range(MAX_KEPT)], 15)
    listening.close()
    listening.close()
    smq.publish("off", "lamp")
    let_others_run()
    assert listening.take() == ([], 0)


def test_topic_listener_does_not_affect_handlers_of_the_application(smq: Any, broker: GeventBroker) -> None:
    heard: list[bytes] = []
    smq.subscribe("lamp", lambda data, *_: heard.append(data))
    listening = LocalTopicListener(broker, ["lamp"])
    smq.publish("on", "lamp")
    wait_until(lambda: heard == [b"on"])
    listening.close()
    smq.publish("off", "lamp")
    wait_until(lambda: heard == [b"on", b"off"])


@pytest.mark.parametrize("names", [["x"] * 21, ["x" * 257]])
def test_topics_of_a_page_are_limited(broker: GeventBroker, names: list[str]) -> None:
    with pytest.raises(ArgumentError, match="topics"):
        LocalTopicListener(broker, [f"{name}{number}" for number, name in enumerate(names)])


def test_topics_must_exist_and_have_a_name(smq: Any, broker: GeventBroker) -> None:
    number = broker.create(b"lamp")
    LocalTopicListener(broker, [number]).close()
    for wrong in (number + 1, 0, -1, 1 << 40):
        with pytest.raises(ArgumentError, match=f"there is no topic {wrong}"):
            LocalTopicListener(broker, [wrong])


class OtherWorker:
    """Calls of another worker, whose reports come from the test."""

    def __init__(self) -> None:
        self.question: Any = None
        self.take: Callable[[Any], object] = lambda report: None

    def follow(self, number: int, question: Callable[[], Any], take: Callable[[Any], object]) -> None:
        self.question, self.take = question(), take
        gevent.sleep(60)

    def report(self, *texts: str, missed: int = 0, why: str = "") -> None:
        messages = [{"text": text, "number": 9} for text in texts]
        self.take({"do": "messages", "messages": messages, "missed": missed, "why": why})


@pytest.fixture
def other() -> Iterator[tuple[OtherWorker, RemoteListener]]:
    rpc: Any = OtherWorker()
    listening = RemoteListener(rpc, 1, {"hub": 1_000_001, "topics": ["lamp"]})
    gevent.sleep(0)
    yield rpc, listening
    listening.close()
    listening.close()


def test_messages_of_another_worker_are_numbered_and_bounded(other: tuple[OtherWorker, RemoteListener]) -> None:
    rpc, listening = other
    assert rpc.question == {"do": "listen", "hub": 1_000_001, "topics": ["lamp"]}
    rpc.report("one", missed=2)
    assert listening.take() == ([{"text": "one", "number": 1}], 2)
    rpc.report(*["x"] * (MAX_KEPT + 3))
    messages, missed = listening.take()
    assert (len(messages), messages[0]["number"], missed) == (MAX_KEPT, 2, 3)
    assert listening.take() == ([], 0)


def test_a_wrong_topic_of_another_worker_raises_at_take(other: tuple[OtherWorker, RemoteListener]) -> None:
    rpc, listening = other
    rpc.report(why="topics: there is no topic 5")
    for _ in range(2):
        with pytest.raises(ArgumentError, match="there is no topic 5"):
            listening.take()


def test_reports_to_another_worker_end_with_their_reader(
    smq: Any, broker: GeventBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_listener, "_REPORT_S", 0.001)
    reports: Any = serve_topic_listener(lambda number: broker, {"hub": 1, "topics": ["lamp"]})
    reading = gevent.spawn(next, reports)
    let_others_run()
    smq.publish("on", "lamp")
    report = reading.get(timeout=5)
    assert ([one["text"] for one in report["messages"]], report["missed"], report["why"]) == (["on"], 0, "")
    reports.close()
    wrong: Any = serve_topic_listener(lambda number: broker, {"hub": 1, "topics": [77]})
    assert [one if one == END else one["why"] for one in wrong] == ["topics: there is no topic 77", END]


# ---- messages of one client


def test_messages_of_a_client_are_recorded_while_somebody_looks(make_site: Callable[..., Any]) -> None:
    site = make_site()
    lamp, door = site.device(b"lamp-1"), site.device(b"door-1")
    number = door.subscribe(b"light")
    broker = site.state
    listening = LocalPeerListener(f"{broker.number}.{lamp.etid}", clock=lambda: 5.0)
    lamp.publish(number, b"on\x1b").publish(number, b"x" * 100)
    door.publish(number, b"mine")
    for _ in range(3):
        door.receive()
    (first, second), missed = listening.take()
    assert missed == 0
    assert first == {
        "number": 1, "at_s": 5.0, "topic": "light", "subtopic": "", "from": lamp.etid, "size_bytes": 3,
        "text": "on\\x1b", "cut": False,
    }  # fmt: skip
    assert (second["number"], second["size_bytes"], len(str(second["text"])), second["cut"]) == (2, 100, 80, True)
    for text in range(MAX_KEPT + 15):
        lamp.publish(number, b"%d" % text)
        door.receive()
    messages, missed = listening.take()
    assert ([one["text"] for one in messages], missed) == ([str(text) for text in range(15, MAX_KEPT + 15)], 15)
    assert broker.traces
    listening.close()
    listening.close()
    assert broker.traces == ()
    lamp.publish(number, b"off")
    door.receive()
    assert listening.take() == ([], 0)


def test_the_client_of_a_listener_must_be_connected(broker: GeventBroker) -> None:
    with pytest.raises(ArgumentError, match="there is no client"):
        LocalPeerListener(f"{broker.number}.5")
    wrong: Any = serve_topic_listener(lambda number: broker, {"peer": f"{broker.number}.5"})
    assert [one if one == END else "there is no client" in one["why"] for one in wrong] == [True, END]


# ---- traces


def test_a_trace_is_of_one_client_or_topic(smq: Any, broker: GeventBroker) -> None:
    for peer, topic in (("", ""), ("a", "b")):
        with pytest.raises(ArgumentError, match="exactly one of peer and topic is needed"):
            start_trace(None, peer, topic)
    with pytest.raises(ArgumentError, match="there is no hub 77"):
        start_trace(77, "", "lamp")
    with pytest.raises(ArgumentError, match="there is no client"):
        start_trace(None, f"{broker.number}.5", "")
    with pytest.raises(ArgumentError, match="give hub=N unless there is exactly one hub"), hub.create():
        start_trace(None, "", "lamp")


def test_a_trace_gives_events_until_it_is_closed(
    smq: Any, broker: GeventBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_listener, "SILENCE_S", 0.001)
    assert broker in all_brokers()
    events = start_trace(broker.number, "", "lamp")
    first = next(events)
    assert first is not None
    assert first["event"] == "tracing"
    assert next(events) is None, "nothing happened"
    smq.publish("on", "lamp")
    seen = [event for event in (next(events) for _ in range(3)) if event is not None]
    assert seen
    assert all(event["time"] for event in seen)
    events.close()


def test_running_traces_are_bounded_unread_ones_are_none(smq: Any, broker: GeventBroker) -> None:
    unread = [start_trace(broker.number, "", "lamp") for _ in range(MAX_TRACES + 1)]
    for trace in unread[:MAX_TRACES]:
        next(trace)
    with pytest.raises(ArgumentError, match=f"{MAX_TRACES} traces are running"):
        start_trace(broker.number, "", "lamp")
    assert TRACES.count == 1
    unread[0].close()
    start_trace(broker.number, "", "lamp").close()
    for trace in unread:
        trace.close()
