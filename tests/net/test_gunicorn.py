"""The manual's Flask application behind a real gunicorn with our worker: pages, raw devices, WebSockets, the end."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gevent import socket

from tests.conftest import REPOSITORY, free_port
from tests.device import RAW, WS, Device, publish, request
from tests.waiting import wait_until

WAIT_S = 30
PAGE = (REPOSITORY / "smqrt" / "help" / "wsgi.md").read_text("utf-8")
APPLICATION = re.search(r"```python\n# flasked/shop.py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMAND = re.search(r"^gunicorn --chdir flasked (.*)$", PAGE, re.MULTILINE)


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


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


@pytest.mark.servers
def test_flask_under_gunicorn(gunicorn: tuple[subprocess.Popen[bytes], int]) -> None:
    process, port = gunicorn
    raw, browser = (Device(("127.0.0.1", port), kind) for kind in (RAW, WS))
    raw.sock.settimeout(WAIT_S)  # the worker is not yet there when the port is
    raw.start(target="/smq").connect(b"raw device")
    browser.start(target="/smq").connect(b"browser-1")
    tid = browser.subscribe(b"news")
    raw.publish(tid, b"x" * 65520)
    browser.expect(publish(tid, raw.etid, b"x" * 65520))
    page = Device(("127.0.0.1", port), RAW)
    page.send_bytes(request("Connection: close\r\n", target="/")).read_head()
    while page.more():
        pass
    assert page.stream.data == b"hello\n"
    browser.expect(publish(tid, 1, b"somebody looks at the page"))
    page = Device(("127.0.0.1", port), RAW)
    page.send_bytes(request("", target="/smq")).read_head()
    assert page.head.startswith(b"HTTP/1.1 404 "), page.head
    page.close()  # gunicorn waits for the connections that are its own
    process.send_signal(signal.SIGTERM)
    raw.expect_end()
    browser.expect_end()
    assert process.wait(WAIT_S) == 0
