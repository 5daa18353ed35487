"""Hubs and threads: all hubs belong to one thread, and others call `publish_threadsafe`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import gevent
import pytest
from gevent.threadpool import ThreadPool

from smqrt import hub
from smqrt.errors import ArgumentError, ClosedError
from smqrt.loop import threads
from tests.support.device import Site, bounded, publish
from tests.support.waiting import let_others_run, wait_until


@pytest.fixture
def thread() -> ThreadPool:
    return ThreadPool(1)


def test_a_hub_in_a_second_thread_is_refused(thread: ThreadPool, site: Site) -> None:
    with pytest.raises(ArgumentError, match="another thread of this process has hubs: .* use publish_threadsafe"):
        thread.apply(hub.create)
    site.device(b"uid-a1").expect_nothing()


FIRST_ENDED = """
import threading
from smqrt import hub
made = []
first = threading.Thread(target=lambda: made.append(hub.create()))
first.start()
first.join()
hub.create().publish("x", "topic")
print("ok")
"""


def test_hubs_of_an_ended_thread_do_not_count() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_ENDED], capture_output=True, text=True, timeout=20, check=False)
    assert (done.stdout, done.returncode) == ("ok\n", 0), done.stderr


def test_a_thread_publishes_in_order(site: Site, thread: ThreadPool) -> None:
    device = site.device(b"uid-a1")
    tid = device.subscribe(b"news")
    payloads: list[Any] = [b"bytes", "text", {"json": 1}, *map(str, range(1000))]

    def work() -> list[bool]:
        return [site.smq.publish_threadsafe(data, "news") for data in payloads]

    assert thread.apply(work) == [True] * len(payloads)
    with bounded():
        device.expect(*(publish(tid, 1, data) for data in (b"bytes", b"text", b'{"json":1}')))
        device.expect(*(publish(tid, 1, b"%d" % number) for number in range(1000)))


def test_a_thread_publishes_with_the_options_for_mqtt(make_site: Callable[..., Site], thread: ThreadPool) -> None:
    smq, got = make_site(mqtt=True).smq, []
    smq.subscribe("house", lambda data, ptid, tid, subtid, mqtt: got.append((data, mqtt)))

    def work() -> bool:
        properties = {"contenttype": "text/plain", "unit": "C"}
        return smq.publish_threadsafe("21", "house", qos=2, retain=True, expiry=60, properties=properties)

    assert thread.apply(work)
    wait_until(lambda: got, "the message")
    data, attributes = got[0]
    assert (data, attributes.qos, attributes.retain) == (b"21", 2, True)
    assert 0 < attributes.expiry <= 60
    assert attributes.properties == {"contenttype": "text/plain", "unit": "C"}
    assert [(name, data) for name, data, _ in smq.retained()] == [("house", b"21")]
    with pytest.raises(ArgumentError, match="qos: '3' is not a QoS"):
        thread.apply(lambda: smq.publish_threadsafe("x", "house", qos=3))


def test_options_for_mqtt_at_a_hub_without_mqtt(site: Site, thread: ThreadPool) -> None:
    with pytest.raises(ArgumentError, match="retain: this hub accepts no MQTT clients"):
        thread.apply(lambda: site.smq.publish_threadsafe("x", "news", retain=True))


def test_an_idle_loop_wakes_up(site: Site, thread: ThreadPool) -> None:
    device = site.device(b"uid-a1")
    tid = device.subscribe(b"news")
    reader = gevent.spawn(device.receive)
    let_others_run()
    thread.spawn(site.smq.publish_threadsafe, "x", tid)
    with bounded(5):
        assert reader.get() == publish(tid, 1, b"x")


def test_waiting_calls_are_bounded_and_refused_visibly(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threads, "MAX_INLET_CALLS", 3)
    assert [site.smq.publish_threadsafe("x", "news") for _ in range(5)] == [True] * 3 + [False] * 2
    let_others_run()
    assert site.smq.publish_threadsafe("x", "news")
    let_others_run()
    monkeypatch.setattr(threads, "MAX_INLET_BYTES", 10)
    assert not site.smq.publish_threadsafe("x" * 11, "news")
    assert threads.CALLS_OF_THREADS.count == 3
    assert "threads pass more calls than the loop handles" in caplog.text


def test_wrong_arguments_raise_in_the_thread(site: Site) -> None:
    for data, topic in ((1.5j, "news"), ("x" * 65521, "news"), ("x", 1.5)):
        with pytest.raises(ArgumentError):
            site.smq.publish_threadsafe(data, topic)  # type: ignore[arg-type]


def test_close_publishes_waiting_calls_and_refuses_later_ones(site: Site) -> None:
    device = site.device(b"uid-a1")
    tid = device.subscribe(b"news")
    site.smq.publish_threadsafe("in time", "news")
    site.smq.close()
    with pytest.raises(ClosedError):
        site.smq.publish_threadsafe("late", "news")
    device.expect_end(publish(tid, 1, b"in time"))
