"""So many Python calls lead from a publish to a subscriber's outbox: each is paid for every message."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import smqrt
from smqrt import hub
from smqrt.broker.outbox import Outbox
from tests.support.device import Site, wait_until

PYTHON_CALLS = 10
SOCKET_CALLS = 4
PACKAGE = f"{Path(smqrt.__file__).parent}/"
"""Not "/smqrt/": `git clone` makes a folder of that name for the whole repository, tests and all."""


def calls_of(function: Callable[[], Any]) -> list[str]:
    """The names of the Python functions that are called within the package."""
    called: list[str] = []

    def profile(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            called.append(frame.f_code.co_qualname)

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return called


def test_calls_of_a_publish_from_python() -> None:
    with hub.create() as smq:
        subscriber = Outbox()
        smq._broker.topic_table.named(b"topic").add(subscriber)
        called = calls_of(lambda: smq.publish(b"data", "topic"))
        assert subscriber.queue.pop().endswith(b"data")
        assert len(called) <= PYTHON_CALLS, called


def test_calls_of_a_publish_from_a_socket(site: Site) -> None:
    """From the event loop's call to the outbox."""
    device = site.device(b"uid-a1")
    subscriber = Outbox()
    topic = site.state.topic_table.named(b"topic")
    topic.add(subscriber)
    device.publish(topic.id, b"the first finds the route")
    wait_until(lambda: subscriber.queue, "the first message")
    subscriber.queue.clear()
    device.publish(topic.id, b"data")
    called = calls_of(site.state.sessions[device.etid].outbox.on_readable)  # before the loop does
    assert subscriber.queue.pop().endswith(b"data")
    assert len(called) <= SOCKET_CALLS, called
