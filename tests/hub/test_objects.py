"""The objects of the Python hub API: messages and requests, closed hubs, and types."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gevent
import pytest
from gevent.event import AsyncResult

from smqrt import hub
from smqrt.errors import ClosedError, JournalError, NoAnswer
from smqrt.wire import smq as wire
from tests.support.device import KINDS, Site, connect_packet, publish
from tests.support.type_checker import check

# ---- messages and requests


def test_on_gives_messages(site: Site) -> None:
    got: list[hub.Message] = []

    @site.smq.on("lamp")
    def switched(message: hub.Message) -> None:
        got.append(message)
        message.reply({"seen": message.json})

    site.smq.on("self", subtopic="ask")(lambda message: message.reply(message.text.upper()))
    assert callable(switched)
    device = site.device()
    lamp, ask = device.create(b"lamp"), device.createsub(b"ask")
    device.publish(lamp, b'{"on":true}', 7).publish(1, b"why?", ask)
    device.expect(
        publish(device.etid, 1, b'{"seen":{"on":true}}', 7),
        publish(device.etid, 1, b"WHY?", ask),
    )
    assert [(one.data, one.etid, one.tid, one.subtid, one.topic) for one in got] == [
        (b'{"on":true}', device.etid, lamp, 7, "lamp")
    ]


def test_a_request_is_answered(site: Site) -> None:
    device, other = site.device(), site.device(b"other-1")
    stray: list[bytes] = []
    site.smq.subscribe("self", lambda data, *_: stray.append(data))
    asked = gevent.spawn(site.smq.request, device.etid, {"what": "temperature"}, 5)
    tid, _, number, data = wire.unpack_publish(wire.frame(device.receive()))
    assert (tid, data) == (device.etid, b'{"what":"temperature"}')
    other.publish(1, b"forged", number).expect_nothing()
    device.publish(1, b"21.5", number).publish(1, b"once more", number)
    answer = asked.get(timeout=5)
    assert (answer.json, answer.etid, answer.topic) == (21.5, device.etid, device.etid)
    device.expect_nothing()
    assert stray == [b"forged"]
    answer.reply("thanks")
    device.expect(publish(device.etid, 1, b"thanks", number))


def test_a_request_from_a_handler(site: Site) -> None:
    """The answer goes past the handler that waits for it."""
    done: AsyncResult[Any] = AsyncResult()

    @site.smq.on("self")
    def asked(message: hub.Message) -> None:
        done.set(site.smq.request(message.etid, "and you?", 5).text)

    device = site.device()
    device.publish(1, b"how are you?")
    device.publish(1, b"fine", wire.unpack_publish(wire.frame(device.receive()))[2]).expect_nothing()
    assert done.get(timeout=5) == "fine"


def test_requests_without_an_answer(site: Site) -> None:
    device = site.device()
    with pytest.raises(NoAnswer, match=rf"^no answer from {device.etid} in 0.01 s$"):
        site.smq.request(device.etid, "x", timeout_s=0.01)
    asked = gevent.spawn(site.smq.request, device.etid, "x", 5)
    device.receive()
    device.close()
    with pytest.raises(NoAnswer, match="the client has disconnected$"):
        asked.get(timeout=5)
    for nobody in (device.etid, site.smq.create("topic")):
        with pytest.raises(TimeoutError, match=r": there is no such client$"):
            site.smq.request(nobody, "x")
    asked = gevent.spawn(site.smq.request, site.device(b"other-1").etid, "x", 5)
    gevent.idle()
    site.smq.close()
    with pytest.raises(NoAnswer):
        asked.get(timeout=5)


# ---- the end


@pytest.mark.parametrize("kind", KINDS)
def test_close_ends_clients_without_a_word(make_site: Callable[..., Site], kind: str) -> None:
    closed: list[Any] = []
    site = make_site(onclose=lambda etid, sock, peer, err: closed.append(err))
    device, waiting = site.device(b"uid-a1", kind), site.open(kind).start()
    tid = device.subscribe(b"news")
    site.smq.publish("the last", "news")
    site.smq.close()
    site.smq.close()
    device.expect_end(publish(tid, 1, b"the last"))
    waiting.send(connect_packet(b"too late")).expect_end()
    assert closed == ["sysshutdown"]


AFTER: list[Callable[[hub.Smq], Any]] = [
    lambda smq: smq.publish("x", "news"),
    lambda smq: smq.pubon("x", 5, 6),
    lambda smq: smq.subscribe("news"),
    lambda smq: smq.observe("news", print),
    lambda smq: smq.create("news"),
    lambda smq: smq.createsub("news"),
    lambda smq: smq.onmsg(print),
]


@pytest.mark.parametrize("call", AFTER)
def test_a_closed_hub_says_so(call: Callable[[hub.Smq], Any]) -> None:
    with hub.create() as smq:
        smq.create("news")
    with pytest.raises(ClosedError, match="^this hub has been closed"):
        call(smq)
    smq.shutdown("again")
    assert smq.drops()["unrouted"] == 0
    assert [peer.uid for _, peer in smq.peers()] == ["SMQ server client"]


def test_a_journal_that_fails_leaves_no_hub(tmp_path: Path) -> None:
    """Its `persist` file is free for the next attempt."""
    (tmp_path / "no folder").write_text("")
    for _ in range(2):
        with pytest.raises(JournalError):
            hub.create(persist=tmp_path / "names", journal=str(tmp_path / "no folder"))
    hub.create(persist=tmp_path / "names").close()


# ---- types

RIGHT = """
from smqrt import hub

def authenticate(credentials: bytes, info: hub.Info) -> int:
    uid: str | bytes = info.uid
    if uid == info["uid"] == "x":
        raise hub.Refused(3, "no")
    return 0

def onpublish(data: bytes, ptid: int, tid: int, subtid: int, peer: hub.Peer) -> bool:
    return peer.sock.peername() is not None

smq = hub.create(authenticate=authenticate, onpublish=onpublish, permittop=lambda topic, issub, peer: True, keepidle=60)

@smq.on("lamp")
def switched(message: hub.Message) -> None:
    message.reply({"json": message.json, "text": [message.text]})

with hub.create(journal=True) as other:
    other.publish(None, "news")
    text: str = other.request(5, 1.5, timeout_s=1).text
"""
WRONG = {
    "a misspelt option": "hub.create(onpubish=lambda *a: True)",
    "a callback that takes too little": "hub.create(onconnect=lambda etid: None)",
    "a number that is text": 'hub.create(keepidle="60")',
    "a payload that JSON does not know": "hub.create().publish({1, 2}, 'news')",
    "a handler that takes no message": "@hub.create().on('lamp')\ndef f() -> None: ...",
}


@pytest.mark.timeout(400)
def test_type_checkers_know_the_api(tmp_path: Path) -> None:
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text("from smqrt import hub\n" + "\n".join(WRONG.values()))
    printed = check(tmp_path)
    assert "right.py" not in printed
    assert "in 1 file (checked 2 source files)" in printed
    for line, what in enumerate(WRONG, 2):
        assert f"wrong.py:{line}: error" in printed, f"{what} was not found:\n{printed}"
    assert 'Unexpected keyword argument "onpubish"' in printed


def test_a_misspelt_option_is_named() -> None:
    with pytest.raises(TypeError, match="onpubish"):
        hub.create(onpubish=print)  # type: ignore[call-arg]
