"""The manual's Flask application behind a real gunicorn with two of our workers: pages, raw devices, WebSockets, one
that is killed, the end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gevent
import pytest

from tests.conftest import REPOSITORY, free_port
from tests.support.device import RAW, WS, Device, publish, request
from tests.support.waiting import wait_until
from tests.wsgi.served import WAIT_S, answers

NODE_BITS = 21  # the upper bits of an ETID are the number of its node
PAGE = (REPOSITORY / "smqrt" / "help" / "wsgi.md").read_text("utf-8")
APPLICATION = re.search(r"```python\n# flasked/shop.py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMAND = re.search(r"^gunicorn --chdir flasked (.*)$", PAGE, re.MULTILINE)


@pytest.fixture
def gunicorn(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    assert APPLICATION
    assert COMMAND
    (tmp_path / "shop.py").write_text(APPLICATION[1])
    port = free_port()
    arguments = COMMAND[1].replace("8000", str(port)).split()
    process = subprocess.Popen([sys.executable, "-m", "gunicorn", *arguments], cwd=tmp_path)
    wait_until(lambda: answers(port), "gunicorn", WAIT_S)
    yield process, port
    process.kill()
    process.wait()


def connect(port: int, kind: str, uid: bytes) -> Device:
    device = Device(("127.0.0.1", port), kind)
    device.sock.settimeout(WAIT_S)  # the workers are not yet there when the port is
    return device.start(target="/smq").connect(uid)


def connect_elsewhere(port: int, kind: str, node: int) -> Device:
    """A client of another node than this one; 0, which no node is, stands for any."""
    for _ in range(1000):  # until the other worker is there, is in the cluster, and takes a connection
        device = connect(port, kind, os.urandom(8))
        if device.etid >> NODE_BITS not in (0, node):
            return device
        device.close()
        gevent.sleep(0.02)
    raise AssertionError("one worker has all clients")


def connect_to_both(port: int) -> tuple[Device, Device]:
    """A raw device and a browser, which are connected to different workers."""
    raw = connect_elsewhere(port, RAW, 0)
    return raw, connect_elsewhere(port, WS, raw.etid >> NODE_BITS)


def look_at_page(port: int) -> None:
    page = Device(("127.0.0.1", port), RAW)
    page.send_bytes(request("Connection: close\r\n", target="/")).read_head()
    while page.more():
        pass
    assert page.stream.data == b"hello\n"


@pytest.mark.servers
def test_flask_under_gunicorn(gunicorn: tuple[subprocess.Popen[bytes], int]) -> None:
    process, port = gunicorn
    raw, browser = connect_to_both(port)
    tid = browser.subscribe(b"news")
    assert raw.subscribe(b"news") == tid
    gevent.sleep(0.5)  # until the other worker knows
    raw.publish(tid, b"x" * 65520)
    for device in (raw, browser):
        device.expect(publish(tid, raw.etid, b"x" * 65520))
    look_at_page(port)
    for device in (raw, browser):
        told = device.receive()
        assert told.endswith(b"page viewed"), told
    page = Device(("127.0.0.1", port), RAW)
    page.send_bytes(request("", target="/smq")).read_head()
    assert page.head.startswith(b"HTTP/1.1 404 "), page.head
    page.close()  # gunicorn waits for the connections that are its own
    process.send_signal(signal.SIGTERM)
    raw.expect_end()
    browser.expect_end()
    assert process.wait(WAIT_S) == 0


@pytest.mark.servers
def test_a_killed_worker_of_gunicorn_is_joined_again(gunicorn: tuple[subprocess.Popen[bytes], int]) -> None:
    process, port = gunicorn
    raw, browser = connect_to_both(port)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    (stays,) = [device for device in (raw, browser) if not has_ended(device)]
    tid = stays.subscribe(b"news")
    again = connect_elsewhere(port, RAW, stays.etid >> NODE_BITS)  # at the new worker
    wait_until(lambda: hears(stays, again, tid), "they do not hear each other", WAIT_S)


def has_ended(device: Device) -> bool:
    device.sock.settimeout(1)
    try:
        return not device.more()
    except TimeoutError:
        return False
    except OSError:
        return True


def hears(one: Device, other: Device, tid: int) -> bool:
    other.publish(other.create(b"news"), b"from another worker")
    try:
        return one.receive() == publish(tid, other.etid, b"from another worker")
    except TimeoutError:
        return False
