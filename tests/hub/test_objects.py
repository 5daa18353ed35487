"""The objects of the Python hub API: info, peers and their sockets, messages and requests, refusals, types,
and what the log says of errors.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gevent
import pytest
from gevent.event import AsyncResult

from smqrt import hub
from smqrt.errors import ClosedError, JournalError, NoAnswer
from smqrt.wire import smq as wire
from tests.conftest import REPOSITORY
from tests.support import sites
from tests.support.device import KINDS, RAW, TLS, WSS, Authority, Site, client_context, connect_packet, publish
from tests.support.waiting import wait_until


@pytest.mark.parametrize("kind", KINDS)
def test_info_is_one_object_for_both(make_site: Callable[..., Site], kind: str) -> None:
    infos: list[Any] = []
    site = make_site(
        authenticate=lambda credentials, info: infos.append(info) or 0,
        onconnect=lambda etid, info, peer: infos.append((info, peer)),
    )
    device = site.open(kind).start(target="/smq?a=1&b=two").send(connect_packet(b"uid-a1", b"", b"about me"))
    device.accepted()
    wait_until(lambda: len(infos) == 2, "onconnect")
    info, (same, peer) = infos
    assert info is same
    assert (info.uid, info.sock, info.seed) == (peer.uid, peer.sock, info["seed"])
    assert (info["uid"], info["info"], info["url"]) == ("uid-a1", "about me", "/smq")
    assert info["data"] == {"a": "1", "b": "two"}
    assert info["header"]["HOST"] == info["header"].get("host") == "test"
    assert ("SimpleMQ" in info["header"]) == (kind in (RAW, TLS))
    assert info["session"] is info["uname"] is None
    assert info["sock"] is peer.sock
    assert info["sock"].peername() == device.sock.getsockname()
    assert info["request"].path == "/smq"
    assert set(info) == set(hub.Info.__annotations__)


@pytest.mark.parametrize("kind", KINDS)
def test_a_socket_is_the_same_thing_over_every_transport(make_site: Callable[..., Site], kind: str) -> None:
    site = make_site()
    device, peer = site.client(b"uid-a1", kind)
    assert peer.sock.peername() == device.sock.getsockname()
    assert peer.sock.certificate() is None
    assert peer.sock.trusted() is False
    assert (peer.sock.tls is not None) == (kind in (TLS, WSS))
    peer.sock.close()
    device.expect_end()
    assert peer.sock.peername() is None
    peer.sock.close()


def test_a_version_2_client_hides_no_tls(make_site: Callable[..., Site]) -> None:
    """Its socket is wrapped, because it takes no large chunks."""
    site = make_site()
    device = site.device(b"uid-a1", TLS, max_frame=300)
    assert site.smq.etid2peer(device.etid).sock.tls is not None  # type: ignore[union-attr]


def test_the_server_has_a_socket_that_goes_nowhere(site: Site) -> None:
    sock, peer = next(site.smq.peers())
    assert peer.uid == "SMQ server client"
    assert sock is peer.sock
    assert [sock.peername(), sock.sockname(), sock.certificate(), sock.trusted()] == [None, None, None, False]
    sock.setsockopt(1, 2, 3)
    sock.close()
    assert site.smq.sock2peer(sock) is peer


@pytest.mark.parametrize("kind", [TLS, WSS])
def test_what_a_certificate_says(make_site: Callable[..., Site], authority: Authority, kind: str) -> None:
    told: list[Any] = []
    site = make_site(onconnect=lambda etid, info, peer: told.append((peer.sock.trusted(), peer.sock.certificate())))
    site.open(kind, client_context(*authority.pair("alice"))).start().send(connect_packet()).accepted()
    wait_until(lambda: told, "onconnect")
    assert told[0][0] is True
    assert told[0][1]["commonname"] == told[0][1]["subject"]["commonname"] == "alice"


def test_refused_is_raised(make_site: Callable[..., Site]) -> None:
    def authenticate(credentials: bytes, info: hub.Info) -> int:
        if credentials == b"slow":
            gevent.sleep(0.01)
        raise hub.Refused(3, "wrong password") if credentials else hub.Refused

    site = make_site(authenticate=authenticate)
    for credentials, answer in ((b"quick", (3, b"wrong password")), (b"slow", (3, b"wrong password")), (b"", (6, b""))):
        packet = connect_packet(b"uid-a1", credentials)
        site.open(RAW).start().send(packet).expect_end(wire.connack(answer[0], 0, answer[1]))


@pytest.mark.parametrize("code", [0, 7, True, "3"])
def test_a_refusal_needs_a_code(code: Any) -> None:
    with pytest.raises(ValueError, match="^code: "):
        hub.Refused(code)


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


# ---- what the log says


@pytest.mark.parametrize(
    "callback", ["authenticate", "permittop", "onconnect", "onpublish", "ondrop", "onmsg", "onclose"]
)
def test_the_log_names_the_callback_and_the_hub(
    make_site: Callable[..., Site], caplog: pytest.LogCaptureFixture, callback: str
) -> None:
    def fails(*_: Any) -> Any:
        raise ValueError("on purpose")

    site = make_site(**{callback: fails})
    device = site.open(RAW).start().send(connect_packet())
    if callback == "authenticate":
        device.expect_end(wire.connack(6, 0))
    else:
        device.accepted()
        device.send(b"\x04news", publish(4711, device.etid, b"x"), publish(1, device.etid, b"x")).receive()
        device.expect_nothing()
        device.close()
    wait_until(lambda: caplog.records, "the log")
    assert f"error in {callback} of the hub made at {sites.__file__}:" in caplog.text
    assert "ValueError: on purpose" in caplog.text


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


def checked(tmp_path: Path, source: str) -> str:
    (tmp_path / "app.py").write_text(source)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--follow-imports=silent", "app.py"]
    environment = os.environ | {"MYPYPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert not done.stderr, done.stderr
    return done.stdout


def test_type_checkers_know_the_api(tmp_path: Path) -> None:
    assert checked(tmp_path, RIGHT).startswith("Success")
    wrong = checked(tmp_path, "from smqrt import hub\n" + "\n".join(WRONG.values()))
    for line, what in enumerate(WRONG, 2):
        assert f"app.py:{line}: error" in wrong, f"{what} was not found:\n{wrong}"
    assert 'Unexpected keyword argument "onpubish"' in wrong


def test_a_misspelt_option_is_named() -> None:
    with pytest.raises(TypeError, match="onpubish"):
        hub.create(onpubish=print)  # type: ignore[call-arg]
