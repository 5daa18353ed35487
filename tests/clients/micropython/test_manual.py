"""The programs and the figures of the page "Devices"."""

from __future__ import annotations

import re

import pytest
import trustme

from smqrt.clients.micropython.smq import SmqClient
from tests.conftest import REPOSITORY
from tests.support import pki
from tests.support.micropython import CLIENT
from tests.support.waiting import wait_until

pytestmark = pytest.mark.servers
PAGE = (REPOSITORY / "smqrt/help/devices.md").read_text("utf-8")


def program(name: str, url: str) -> str:
    """A program of the page, for another broker."""
    text = re.search(rf"^```python\n(# {name}\.py.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[1]
    return re.sub(r'"https?://\S+/chat/smq.lsp"', repr(url), text)


@pytest.mark.parametrize("name", ["main", "tasks"])
def test_programs_that_publish(start_broker, run, name):
    broker = start_broker()
    device = run(program(name, broker.url))
    assert device.next() == 21.5, "its own message, which it prints"
    broker.smq.publish("7", "say")
    assert device.next() == 7


def test_the_program_that_sleeps(start_broker, run):
    received = []
    broker = start_broker(onpublish=lambda data, ptid, tid, subtid, peer: received.append((data, peer.uid)) or True)
    device = run(program("sleeper", broker.url))
    assert device.wait() == 0
    assert device.other == ["received: True\n"]
    assert received == [(b"21.5", "device-7")]


def test_the_program_that_answers(start_broker, run):
    etids, answers = [], []
    broker = start_broker(
        onconnect=lambda etid, info, peer: etids.append(etid),
        onmsg=lambda data, ptid, tid, subtid: answers.append((data, ptid, subtid)),
    )
    run(program("answer", broker.url))
    etid = wait_until(lambda: etids)[0]
    broker.smq.publish(b"?", etid, 77)
    assert wait_until(lambda: answers) == [(b"21.5", etid, 77)]


def test_the_program_that_observes_and_requests(start_broker, run):
    broker = start_broker(onmsg=lambda data, ptid, tid, subtid: broker.smq.publish("5", ptid, subtid))
    device = run(program("remote", broker.url))
    assert sorted([device.next(), device.next()]) == [0, 5]


def test_the_program_with_tls(start_broker, run, tmp_path, monkeypatch):
    authority, etids = trustme.CA(), []
    broker = start_broker(
        host="localhost",
        context=pki.gevent_context(authority.issue_cert("localhost")),
        onconnect=lambda etid, info, peer: etids.append(etid),
    )
    (tmp_path / "ca.der").write_bytes(pki.der_of(authority))
    monkeypatch.chdir(tmp_path)
    run(program("secure", broker.url))
    assert wait_until(lambda: etids)


def test_every_option_and_method_is_documented():
    names = [name for name in vars(SmqClient) if not name.startswith("_")]
    names += re.findall(r"^    def ([a-z]+)", (CLIENT / "smq_full.py").read_text("utf-8"), re.MULTILINE)
    assert len(names) > 20
    first_cells = " ".join(re.findall(r"^\| (.*?) \|", PAGE, re.MULTILINE))
    assert [name for name in names if not re.search(rf"`{name}[`(]", first_cells)] == []


# ---- memory

EXCHANGE = """
import gc
gc.collect()
before = gc.mem_alloc()
from {module} import SmqClient
gc.collect()
imported = gc.mem_alloc()
received = []
smq = SmqClient({url!r}, **{options})
smq.subscribe("t", onmsg=lambda data, *numbers: received.append(len(data)), onack=lambda *values: show("ready"))
while not smq.connected:
    smq.poll(100)
gc.collect()
connected = gc.mem_alloc()
sent = total = 0
while total < 1000:
    while sent < 1000 and smq.publish(64 * b"x", "t"):
        sent += 1
    smq.poll(1000)
    total += received.count(64)
    received.clear()
gc.collect()
show([imported - before, connected - imported, gc.mem_alloc() - connected, smq.dropped])
"""


COLUMNS = ("smq", "smq_full")


def figure(row: str, module: str) -> float:
    """A number of the table of memory."""
    cells = re.search(rf"^\| {re.escape(row)} \| ([\d,]+) \| ([\d,]+) \|$", PAGE, re.MULTILINE)
    return float(cells[1 + COLUMNS.index(module)].replace(",", ""))


@pytest.mark.parametrize("module", COLUMNS)
@pytest.mark.parametrize("options", [{}, {"max_message": 512, "queue_bytes": 512}])
def test_memory(start_broker, run, options, module):
    broker = start_broker()
    smallest_kib = figure("smallest heap for 1,000 messages of 64 bytes, KiB", module)
    text = EXCHANGE.format(url=broker.url, options=options, module=module)
    device = run(text, heap=f"{smallest_kib * 1.1:.0f}K")
    assert device.next() == "ready"
    imported, connected, growth, dropped = device.next()
    code = figure("code of the client after `import` (`gc.mem_alloc`), bytes", module)
    assert imported == pytest.approx(code, rel=0.1)
    row = "the same with `max_message=512, queue_bytes=512`, bytes"
    row = row if options else "a connected client with one subscription, default options, bytes"
    assert connected == pytest.approx(figure(row, module), rel=0.1)
    assert growth <= 1000
    assert dropped == 0
