"""The Python API accepts what the documents of SMQ write: tables of options, names of arguments, socket methods."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from socket import IPPROTO_TCP, TCP_KEEPIDLE, TCP_KEEPINTVL, TCP_NODELAY
from sys import byteorder
from typing import Any

import pytest

from smqrt import hub
from smqrt.errors import ArgumentError
from tests.support.device import KINDS, TLS, WSS, Site, publish
from tests.support.waiting import wait_until


def f(*_: Any) -> None:
    pass


# ---- tables of options


def test_create_takes_a_dict_and_keywords_win(make_site: Callable[..., Site]) -> None:
    dropped: list[bytes] = []

    def ondrop(data: bytes, *_: Any) -> None:
        dropped.append(data)

    smq = hub.create({"queuesize": 7, "ondrop": ondrop, "rndtid": True}, queuesize=9, rndtid=None)
    assert smq.queuesize() == (9, 0)
    assert smq.gettid() != 1, "an argument that is None replaces nothing"
    smq.publish("lost", "news")
    wait_until(lambda: dropped == [b"lost"], "ondrop")
    assert hub.create({}).queuesize() == hub.create(None).queuesize() == (200, 0)


def test_wrong_dict_and_keyword_options_are_named_alike() -> None:
    for call in (lambda: hub.create({"onpubish": f}), lambda: hub.create(onpubish=f)):  # type: ignore[call-arg]
        with pytest.raises(TypeError, match=r"onpubish is not an option; did you mean onpublish\?"):
            call()
    with pytest.raises(ArgumentError, match="^queuesize must be "):
        hub.create({"queuesize": "many"})
    with pytest.raises(ArgumentError, match="^options: a dict is needed, not function$"):
        hub.create(f)  # type: ignore[arg-type]


def test_subscribe_takes_a_dict(site: Site) -> None:
    got: list[Any] = []
    tid = site.smq.subscribe("x", {"onmsg": lambda *given: got.append(given), "subtopic": "a", "json": True})
    site.smq.subscribe("x", {"onmsg": lambda *given: got.append("other")}, subtopic="b")
    site.smq.subscribe("x", {})
    device, stid = site.device(), site.smq.createsub("a")
    device.send(publish(tid, device.etid, b"[1]", stid), publish(tid, device.etid, b"2", site.smq.createsub("b")))
    wait_until(lambda: len(got) == 2, "both messages")
    assert got == [([1], device.etid, tid, stid), "other"]
    with pytest.raises(ArgumentError, match="^onmsg: a function is needed"):
        site.smq.subscribe("x", {"onmsg": 5})


def test_unknown_options_of_subscribe_are_named(caplog: pytest.LogCaptureFixture) -> None:
    hub.create().subscribe("x", {"onmsg": f, "onmesg": f, "once": True})
    assert [record.message.rpartition("/")[2].partition(":")[0] for record in caplog.records] == [
        __file__.rpartition("/")[2]
    ]
    assert "smq.subscribe has no option 'onmesg'; it is ignored" in caplog.text


# ---- names of arguments

DOCUMENTED: dict[str, dict[str, Any]] = {  # signatures (spec: smq §2.3 to §2.5), each with values that are accepted
    "create": {"topic": "t", "tid": 7},
    "createsub": {"subtopic": "s", "stid": 8},
    "gettid": {},
    "publish": {"data": "x", "topic": "t", "subtopic": "s", "ptid": 1},
    "pubon": {"data": "x", "totid": 1, "fromtid": 1, "subtopic": 0},
    "subscribe": {"topic": "t"},
    "unsubscribe": {"topic": "t"},
    "observe": {"topic": "t", "onchange": f},
    "unobserve": {"topic": "t"},
    "onmsg": {"onmsg": f},
    "queuesize": {},
    "tid2topic": {"tid": 7},
    "topic2tid": {"topic": "t"},
    "subtopic2tid": {"subtopic": "s"},
    "tid2subtopic": {"tid": 8},
    "peers": {},
    "sock2peer": {"sock": None},
    "etid2peer": {"etid": 1},
    "topics": {},
    "subtopics": {},
    "setkeepalive": {"time": 60, "intv": 6},
    "shutdown": {"msg": "the end", "etid": 4711},
}
FORMER: dict[str, dict[str, Any]] = {
    "pubon": {"data": "x", "totid": 1, "fromtid": 1, "subtid": 0},
    "observe": {"topic": "t", "function": f},
    "onmsg": {"function": f},
    "topic2tid": {"name": "t"},
    "subtopic2tid": {"name": "s"},
    "tid2subtopic": {"stid": 8},
    "setkeepalive": {"idle": 60, "intv": 6},
}


@pytest.mark.parametrize("method", DOCUMENTED)
def test_documented_names_of_arguments(method: str, caplog: pytest.LogCaptureFixture) -> None:
    getattr(hub.create(), method)(**DOCUMENTED[method])
    assert not caplog.records
    declared = list(signature(getattr(hub.Smq, method)).parameters)[1:]
    assert declared[: len(DOCUMENTED[method])] == list(DOCUMENTED[method]), "in this order too"


@pytest.mark.parametrize("method", FORMER)
def test_former_names_of_arguments_work(method: str) -> None:
    smq = hub.create()
    assert getattr(smq, method)(**FORMER[method]) == getattr(smq, method)(**DOCUMENTED[method])
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        getattr(smq, method)(**{**DOCUMENTED[method], **FORMER[method]})


def test_connect_by_the_names_of_its_arguments() -> None:
    for name in ("cmd", "request"):
        with pytest.raises(ArgumentError, match="^request: not an HTTP request"):
            hub.create().connect(**{name: 5}, arg=6)


# ---- sockets of clients


@pytest.mark.parametrize("kind", KINDS)
def test_documented_methods_of_a_clients_socket(make_site: Callable[..., Site], kind: str) -> None:
    site = make_site()
    device, peer = site.client(b"uid-a1", kind)
    sock, below = peer.sock, peer.sock.transport
    assert below is not None
    assert sock.setoption("keepalive", True, 60, 7) is True
    keep_alive = [below.getsockopt(IPPROTO_TCP, option, 4) for option in (TCP_KEEPIDLE, TCP_KEEPINTVL)]
    assert [int.from_bytes(value, byteorder) for value in keep_alive] == [60, 7]
    for name, is_on in (("nodelay", False), ("tcp-nodelay", True), ("nodelay", True)):
        sock.setoption(name, is_on)
        assert any(below.getsockopt(IPPROTO_TCP, TCP_NODELAY, 4)) is is_on
    cipher = sock.cipher()
    assert (cipher is not None) == (kind in (TLS, WSS))
    assert cipher is None or cipher[1] == "TLSv1.3"
    assert sock.isresumed() is False
    sock.close()
    device.expect_end()
    assert sock.setoption("nodelay", True) is False


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("nonsense", True), "unknown option 'nonsense'; use one of keepalive, "),
        (("keepalive", 1), "'keepalive' takes true or false"),
        (("keepalive", True, 0), "'keepalive' takes seconds, 1 to 32767, not 0"),
    ],
)
def test_wrong_options_of_a_socket_are_named(arguments: Any, error: str) -> None:
    sock, _ = next(hub.create().peers())
    with pytest.raises(ArgumentError, match=f"^setoption: {error}"):
        sock.setoption(*arguments)


# ---- clients


def test_uid_and_info_are_what_the_client_sent(make_site: Callable[..., Site]) -> None:
    told: list[tuple[Any, ...]] = []
    site = make_site(onconnect=lambda etid, info, peer: told.append((info.uid, info["info"], peer.uid, peer.info)))
    site.device("sensör-1".encode(), info=b"attic")
    site.device(b"\xff\xfe\xfd\xfc\xfb\xfa", info=b"\xff")
    wait_until(lambda: len(told) == 2, "onconnect")
    assert told == [("sensör-1", "attic") * 2, (b"\xff\xfe\xfd\xfc\xfb\xfa", b"\xff") * 2]


def test_info_has_its_entries_as_attributes(make_site: Callable[..., Site]) -> None:
    infos: list[hub.Info] = []
    site = make_site(authenticate=lambda credentials, info: infos.append(info) or 0)
    site.device()
    (info,) = infos
    assert {name: getattr(info, name) for name in info} == info
    info.rank = 1
    assert info["rank"] == info.rank == 1
    with pytest.raises(AttributeError, match="^info has no 'nonsense'; it has arg, seed, uid, "):
        _ = info.nonsense
