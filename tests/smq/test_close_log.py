"""Records and log lines of closed connections."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from smqrt.broker.outbox import Outbox
from smqrt.broker.sessions import TOO_MANY_CONNECTIONS, Session
from smqrt.broker.state import Hooks
from smqrt.broker.topics import USER_CONNECTIONS
from smqrt.errors import CloseReason
from smqrt.smq import close_log
from smqrt.smq.close_log import DETAIL_CHARS, UNKNOWN, Closed, CloseLog, explanation_of, fields, record, sentence
from tests.broker.memory_clients import Crowd, Ear

HUBS = iter(range(1_000_000, 2_000_000))
"""Numbers of hubs that no other test has: each reason is logged once a second for each hub."""


class Watched:
    """A client, and what is recorded of it.

    Attributes:
        closed: the records.
    """

    def __init__(self, hooks: Hooks | None = None) -> None:
        self.hub = next(HUBS)
        self.crowd = Crowd(hooks)
        self.closed: list[Closed] = []

    def client(self, uid: bytes = b"uid-0001") -> Session:
        return self.crowd.client(uid)

    def close(self, reason: CloseReason, detail: str = "", session: Session | None = None) -> Closed:
        record(self.hub, session or self.client(), reason, detail)
        return self.closed[-1]


@pytest.fixture
def watched(caplog: pytest.LogCaptureFixture) -> Iterator[Watched]:
    caplog.set_level(logging.INFO, "smqrt.close")
    found = Watched()
    close_log.observers.append(found.closed.append)
    yield found
    close_log.observers.remove(found.closed.append)


def transport(**attributes: Any) -> Any:
    """A send queue over a transport with these attributes."""
    return SimpleNamespace(websocket=False, takes_fragments=True, transport=SimpleNamespace(**attributes))


def test_the_log_keeps_the_newest() -> None:
    log = CloseLog(kept=2)
    for number in range(3):
        log.add(number)  # type: ignore[arg-type]
    assert list(log.newest_first()) == [2, 1]
    assert log.count == 3


def test_a_record_tells_who_when_and_why(watched: Watched) -> None:
    before = close_log.closes.count
    closed = watched.close(CloseReason.PUBLISH_RATE, "9 messages")
    assert (closed.number, closed.hub, closed.uid) == (before + 1, watched.hub, b"uid-0001")
    assert (closed.reason, closed.detail, closed.setting) == (
        CloseReason.PUBLISH_RATE,
        "9 messages",
        "limits.publish_rate",
    )
    assert next(close_log.closes.newest_first()) is closed
    assert closed.connected_s == 0.0


def test_a_rejected_client_was_not_connected(watched: Watched) -> None:
    session = Session(watched.crowd.broker, Ear(), 5)
    closed = watched.close(CloseReason.BAD_CONNECT, session=session)
    assert (closed.connected_s, closed.etid) == (None, 0)


def test_details_are_cut(watched: Watched) -> None:
    assert len(watched.close(CloseReason.BAD_CONNECT, "x" * 1000).detail) == DETAIL_CHARS


def test_a_reason_is_logged_once_a_second_per_hub(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        watched.close(CloseReason.SLOW_CONSUMER)
    watched.close(CloseReason.IDLE)
    watched.hub = next(HUBS)
    watched.close(CloseReason.SLOW_CONSUMER)
    assert len(caplog.records) == 3
    assert len(watched.closed) == 5


def test_only_trouble_is_a_warning(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    watched.close(CloseReason.SHUTDOWN)
    watched.close(CloseReason.BAD_CONNECT)
    assert [one.levelno for one in caplog.records] == [logging.INFO, logging.WARNING]
    caplog.set_level(logging.WARNING, "smqrt.close")
    watched.hub = next(HUBS)
    watched.close(CloseReason.SHUTDOWN)
    assert len(caplog.records) == 2


def closed_as(reason: CloseReason, **more: Any) -> Closed:
    values = {"uid": b"", "address": "192.0.2.1", "transport": "raw", "detail": "", "connected_s": None, **more}
    return Closed(number=1, at_s=0.0, hub=1, etid=0, user="", reason=reason, **values)


@pytest.mark.parametrize(
    ("closed", "line"),
    [
        (closed_as(CloseReason.SHUTDOWN), f"closed: 192.0.2.1 raw: {CloseReason.SHUTDOWN.value}"),
        (
            closed_as(CloseReason.IDLE, uid=b"a\n", detail="silent", setting="limits.idle_s"),
            rf"closed: b'a\n' 192.0.2.1 raw: {CloseReason.IDLE.value} (silent); see limits.idle_s",
        ),
        (
            closed_as(CloseReason.PEER_CLOSED, setting="hub option keepidle", detail=CloseReason.PEER_CLOSED.value),
            f"closed: 192.0.2.1 raw: {CloseReason.PEER_CLOSED.value}",
        ),
    ],
)
def test_a_line_has_what_helps(closed: Closed, line: str) -> None:
    assert sentence(closed) == line


def test_json_fields_are_text() -> None:
    found = fields(closed_as(CloseReason.IDLE, uid=b"a\xff"))
    assert (found["reason"], found["uid"]) == ("idle", "a\\xff")


def test_a_reason_without_explanation_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {reason: said for reason, said in close_log.EXPLANATIONS.items() if reason is not CloseReason.IDLE}
    monkeypatch.setattr(close_log, "EXPLANATIONS", others)
    assert explanation_of(CloseReason.IDLE) is UNKNOWN


@pytest.mark.parametrize(
    ("has_logins", "detail", "setting"),
    [
        (True, "a wrong password", "auth.users"),
        (False, "of the application", ""),
        (True, TOO_MANY_CONNECTIONS, USER_CONNECTIONS.setting),
        (False, TOO_MANY_CONNECTIONS, USER_CONNECTIONS.setting),
    ],
)
def test_a_rejection_names_the_check_that_failed(watched: Watched, has_logins: bool, detail: str, setting: str) -> None:
    session = watched.client()
    session.broker.hooks.has_logins = has_logins
    assert watched.close(CloseReason.REFUSED, detail, session).setting == setting


@pytest.mark.parametrize(
    ("protocol", "websocket", "takes_fragments", "kind"),
    [
        ("smq", False, True, "raw"),
        ("smq", True, False, "websocket"),
        ("smq", False, False, "websocket"),
        ("mqtt", False, False, "mqtt"),
        ("mqtt", True, False, "mqtt-websocket"),
    ],
)
def test_a_transport_has_a_name(protocol: str, websocket: bool, takes_fragments: bool, kind: str) -> None:
    outbox: Any = SimpleNamespace(protocol=protocol, websocket=websocket, takes_fragments=takes_fragments)
    assert close_log.transport_of(outbox) == kind


def test_addresses_of_closed_connections_are_known() -> None:
    def closed() -> tuple[str, int]:
        raise OSError

    assert close_log.address_of(transport(peer_host="192.0.2.1", getpeername=closed)) == "192.0.2.1"
    assert close_log.address_of(transport(getpeername=lambda: ("192.0.2.2", 5))) == "192.0.2.2"
    assert close_log.address_of(transport(getpeername=closed)) == ""
    assert close_log.address_of(transport(getpeername=lambda: ())) == ""
    assert close_log.address_of(Outbox()) == ""


def test_the_kernel_counts_bytes_of_tcp_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        there, _ = server.accept()
        with there:
            client.sendall(bytes(7))
            there.recv(10)
            there.sendall(bytes(3))
            client.recv(10)
            outbox: Any = SimpleNamespace(transport=there)
            assert close_log.transferred(outbox)[0] == 7
    one, other = socket.socketpair()
    with one, other:
        outbox = SimpleNamespace(transport=one)
        assert close_log.transferred(outbox) == (None, None)
    assert close_log.transferred(Outbox()) == (None, None)


def test_traffic_is_counted_for_observers_alone(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(close_log, "transferred", lambda outbox: (5, 6))
    closed = watched.close(CloseReason.SHUTDOWN)
    assert (closed.bytes_received, closed.bytes_sent) == (5, 6)
    monkeypatch.setattr(close_log, "observers", [])
    watched.close(CloseReason.SHUTDOWN)
    assert next(close_log.closes.newest_first()).bytes_received is None
