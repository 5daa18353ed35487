"""Last values at a hot restart, and when one application starts again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from smqrt.wire.smq import Type
from tests.server.restart.hot import PRELOAD, HotServed, application, heard
from tests.support.device import Device
from tests.support.waiting import wait_until

pytestmark = pytest.mark.servers

Serve = Callable[..., HotServed]
APPLICATION = """
smq:subscribe("state/a", {onmsg = function(data) smq:publish("app:" .. data, "seen") end})
"""


def with_values(options: str) -> str:
    """An application that keeps last values, and follows one itself."""
    return PRELOAD.replace('name = "main",', f'name = "main", lastvalue = "state/#", {options}') + APPLICATION


def greeting(device: Device, topic: bytes) -> list[tuple[bytes, bytes]]:
    """Sub-topic and payload of what a new subscriber gets."""
    device.subscribe(topic)
    return [(one[9:13], one[13:]) for one in device.sync() if one[0] == Type.PUBLISH]


@pytest.mark.parametrize("persists", [False, True], ids=["memory", "file"])
def test_last_values_go_along(serve_hot: Serve, tmp_path: Path, persists: bool) -> None:
    options = f'persist = "{tmp_path}/names.db",' if persists else ""
    served = serve_hot(application(tmp_path / "app", with_values(options)))
    publisher, follower = served.device(b"publisher"), served.device(b"follower")
    seen = follower.subscribe(b"seen")
    topics = [publisher.create(b"state/%d" % number) for number in range(3)]
    state, gone, sub = publisher.create(b"state/a"), publisher.create(b"state/gone"), publisher.createsub(b"sub")
    many = publisher.createsub(b"large")
    for number, topic in enumerate(topics):
        publisher.publish(topic, b"old").publish(topic, b"%d" % number).publish(topic, b"s%d" % number, sub)
        publisher.publish(topic, b"%d" % number * 30_000, many)
    publisher.publish(gone, b"x").publish(gone, b"").publish(state, b"1").sync()
    assert heard(follower) == (seen, b"app:1")
    for _ in range(2):
        served.restart()
        assert heard(follower) == (seen, b"app:1")  # the application of the new process gets its value too
    for number in range(3):
        due = [(0, b"%d" % number), (sub, b"s%d" % number), (many, b"%d" % number * 30_000)]
        found = greeting(served.device(b"late-%02d" % number), b"state/%d" % number)
        assert sorted(found) == sorted((stid.to_bytes(4, "big"), payload) for stid, payload in due)
    late = served.device(b"late-a")
    assert greeting(late, b"state/gone") == []
    publisher.publish(topics[0], b"").publish(topics[1], b"new").sync()
    assert [payload for stid, payload in greeting(late, b"state/1") if stid == bytes(4)] == [b"new"]
    served.restart()
    assert bytes(4) not in dict(greeting(served.device(b"later-1"), b"state/0"))  # what was taken away stays away


def test_an_application_that_starts_again_keeps_its_last_values(serve_hot: Serve, tmp_path: Path) -> None:
    app = application(tmp_path / "app", with_values("keep = true,"))
    served = serve_hot(app, "--reload")
    device = served.device()
    seen, state = device.subscribe(b"seen"), device.create(b"state/a")
    device.publish(state, b"7")
    assert heard(device) == (seen, b"app:7")
    application(app, with_values("keep = true,") + "-- edited")
    assert heard(device) == (seen, b"app:7")
    wait_until(lambda: served.output.count("app app at /: ok") > 1, served.lines)
    assert greeting(served.device(b"late-1"), b"state/a") == [(bytes(4), b"7")]
