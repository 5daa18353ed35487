"""Peers of a hub and their sockets, what an application learns of a client, and the values that it gives."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import gevent
import pytest

from smqrt import hub
from smqrt.errors import ArgumentError
from smqrt.hub import peer
from smqrt.wire import smq as wire
from tests.support.device import KINDS, RAW, TLS, WSS, Authority, Site, client_context, connect_packet
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


# ---- values of applications


@pytest.mark.parametrize(
    ("convert", "value", "found"),
    [
        (peer.as_number, 7, 7),
        (peer.as_number, True, "a number is needed, not bool"),
        (peer.as_number, 7.0, "a number is needed, not float"),
        (peer.as_text, "\udcff", b"\xff"),
        (peer.as_text, b"\xff", b"\xff"),
        (peer.as_text, None, "a str or bytes is needed, not NoneType"),
        (peer.as_destination, "news", b"news"),
        (peer.as_destination, 7, 7),
        (peer.as_destination, False, "a name (str or bytes) or an id is needed, not bool"),
        (peer.as_function, len, len),
        (peer.as_function, "len", "a function is needed, not str"),
    ],
)
def test_values_are_converted_or_named(convert: Callable[[str, object], object], value: object, found: object) -> None:
    if isinstance(found, str):
        with pytest.raises(ArgumentError) as error:
            convert("what", value)
        assert str(error.value) == f"what: {found}"
    else:
        assert convert("what", value) == found


def test_names_are_text_unless_they_are_not_utf_8() -> None:
    assert [peer.text_of(name) for name in (b"news", "ü".encode(), b"\xff")] == ["news", "ü", b"\xff"]
    assert [peer.name_or_none(name) for name in (None, b"", b"a")] == [None, "", "a"]
    assert list(peer.text_names(iter([(1, b"a"), (2, b"\xff")]))) == [(1, "a"), (2, b"\xff")]


# ---- what an application learns of a client


def test_header_fields_have_names_of_any_case() -> None:
    found = peer.HeaderFields([("Accept", "a"), ("accept", "b"), ("Cookie", "x=1"), ("cookie", "y=2")])
    assert found["ACCEPT"] == found.get("Accept") == "a,b"
    assert found["Cookie"] == "x=1; y=2"
    assert "COOKIE" in found
    assert 7 not in found
    assert (found.get("host"), found.get("host", "none")) == (None, "none")


def test_unknown_entries_of_info_name_the_known() -> None:
    info = peer.Info(uid="a", url="/")
    info.more = 7
    assert info["more"] == 7
    with pytest.raises(AttributeError, match="info has no 'sed'; it has uid, url, more"):
        info.sed  # noqa: B018


def client(request: Any, **more: Any) -> Any:
    """A client whose connection was opened by this request."""
    origin = SimpleNamespace(info=None, request=request, arg="arg")
    values = {"uid": b"uid-a1", "info": b"\xff", "etid": 5, "identity": None, "extra": None, "topic_ids": ()}
    return SimpleNamespace(origin=origin, seed=9, outbox=SimpleNamespace(dropped=3), **{**values, **more})


def test_info_of_wsgi_comes_from_the_environ() -> None:
    environ = {
        "SCRIPT_NAME": "/app",
        "PATH_INFO": "/smq",
        "QUERY_STRING": "a=1&b=&a=2&c=%ff",
        "HTTP_ACCEPT_LANGUAGE": "de",
        "REMOTE_USER": "alice",
    }
    info = peer.info_of(client(environ))
    assert (info.url, info.uname, info.session, info.restored) == ("/app/smq", "alice", None, False)
    assert info.data == {"a": "2", "b": "", "c": "\udcff"}
    assert info.header["Accept-Language"] == "de"
    assert info.info == b"\xff"


def test_a_restored_client_has_no_request() -> None:
    session = client(None)
    info = peer.info_of(session)
    assert (info.restored, info.url, dict(info.header), info.uname) == (True, "", {}, None)
    assert peer.info_of(session) is info


def test_the_client_user_precedes_that_of_the_page() -> None:
    identity = SimpleNamespace(user="bob", groups=("staff",))
    session = client({"REMOTE_USER": "alice"}, identity=identity)
    assert peer.info_of(session).uname == "bob"
    found = peer.peer_of(session)
    assert (found.user, found.groups, found.dropped) == ("bob", ("staff",), 3)
    identity.user = ""
    assert found.user is None, "an anonymous client"


def test_a_peer_is_complete_once_it_has_connected() -> None:
    session = client(None, etid=0, uid=b"", info=b"")
    found = peer.peer_of(session)
    session.etid, session.uid, session.info = 7, b"uid-a1", b"about"
    assert peer.peer_of(session) is found
    assert (found.tid, found.uid, found.info) == (7, "uid-a1", "about")
    session.uid = b"another"
    assert peer.peer_of(session).uid == "uid-a1"
    assert found.topics is None
    session.topic_ids = [5]
    assert found.topics == {5: found.sock}
