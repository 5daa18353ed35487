"""Hot restarts under load, and with what else has to change hands: journal, names, clients in Python and browsers."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smqrt.client import SmqClient
from tests.conftest import REPOSITORY
from tests.server.restart.hot import PRELOAD, HotServed, application, heard
from tests.support.waiting import wait_until

pytestmark = pytest.mark.servers

Serve = Callable[..., HotServed]


def test_nothing_is_lost_under_load() -> None:
    """The long form: `scripts/bench/hot_restart.py` without arguments."""
    script = REPOSITORY / "scripts/bench/hot_restart.py"
    words = ["--clients", "60", "--per-s", "1000", "--restarts", "2", "--between-s", "0.3"]
    ran = subprocess.run([sys.executable, script, *words], capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    sent, received = map(int, re.search(r"(\d+) messages sent, (\d+) received", ran.stdout).groups())  # type: ignore[union-attr]
    assert sent == received > 1000


def test_journal_and_names_change_hands(serve_hot: Serve, tmp_path: Path) -> None:
    options = f'name = "main", journal = "{tmp_path}/journal", persist = "{tmp_path}/names",'
    app = application(tmp_path / "app", PRELOAD.replace('name = "main",', options))
    served = serve_hot(app)
    device = served.device()
    topic = device.subscribe(b"news")
    count = 0
    for _ in range(2):
        for _ in range(50):
            device.publish(topic, b"%d" % count)
            count += 1
        assert [heard(device)[1] for _ in range(50)] == [b"%d" % number for number in range(count - 50, count)]
        served.restart()
    device.publish(topic, b"last")
    assert heard(device) == (topic, b"last")
    fresh = device.create(b"fresh")  # acknowledged: the disk has it
    device.disconnect()
    served.end()
    command = [sys.executable, "-m", "smqrt", "journal", "stats", "--json", str(tmp_path / "journal")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert re.search(rf'"news": {count + 1}\b', ran.stdout), ran.stdout
    assert "damage" not in served.output
    assert "torn" not in served.output
    again = serve_hot(app)
    device = again.device()
    assert (device.create(b"news"), device.create(b"fresh")) == (topic, fresh)


def test_a_python_client_and_a_browser_notice_nothing(serve_hot: Serve, page: Any, tmp_path: Path) -> None:
    html = """<!doctype html><link rel=icon href="data:,"><script src="/rtl/smq.js"></script><pre id=log></pre><script>
const smq = SMQ.Client(SMQ.wsURL("smq.lsp"));
const say = (text) => document.getElementById("log").textContent += text + "\\n";
smq.onclose = (message) => { say("closed " + message); return 0; };
smq.onconnect = (etid) => { say("connected");
  smq.subscribe("news", {datatype: "text", onmsg: (data) => say("news " + data), onack: () => say("subscribed")}); };
</script>"""
    app = application(tmp_path / "app")
    (app / "index.html").write_text(html)
    served = serve_hot(app)
    page.goto(served.url)
    page.wait_for_function("document.getElementById('log').textContent.includes('subscribed')")
    heard_here: list[bytes] = []
    closed: list[object] = []
    with SmqClient(f"{served.url}/smq.lsp", onclose=lambda *why: closed.append(why)) as client:
        client.subscribe("news", onmsg=lambda data, *_: heard_here.append(data))
        client.publish(b"one", "news")
        wait_until(lambda: heard_here, "the client hears itself")
        served.restart()
        client.publish(b"two", "news")
        wait_until(lambda: heard_here == [b"one", b"two"], heard_here)
        page.wait_for_function("document.getElementById('log').textContent.includes('news two')")
        assert page.inner_text("#log").split() == ["connected", "subscribed", "news", "one", "news", "two"]
        assert closed == []
