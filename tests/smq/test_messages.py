"""Messages: the values that may be sent, and the answers to requests."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gevent
import pytest

from smqrt.errors import ArgumentError, NoAnswer
from smqrt.smq.messages import REMEMBERED_REQUESTS, Message, payload
from smqrt.smq.requests import Requests

PAYLOADS: list[tuple[Any, bytes]] = [
    (b"\xff\0", b"\xff\0"),
    (bytearray(b"ab"), b"ab"),
    (memoryview(b"ab"), b"ab"),
    ("ä", b"\xc3\xa4"),
    (b"\xff".decode("utf-8", "surrogateescape"), b"\xff"),
    ("", b""),
    ({"a": [1, 2.5, None, True, "x"]}, b'{"a":[1,2.5,null,true,"x"]}'),
    ([], b"[]"),
    ((1, 2), b"[1,2]"),
    (5, b"5"),
    (-0.5, b"-0.5"),
    (True, b"true"),
    (None, b"null"),
    (math.nan, b"null"),
    ({"a": [math.inf, {"b": (-math.inf, 1)}]}, b'{"a":[null,{"b":[null,1]}]}'),
]


@pytest.mark.parametrize(("data", "sent"), PAYLOADS)
def test_payloads(data: Any, sent: bytes) -> None:
    assert payload(data) == sent


def endless() -> list[Any]:
    ring: list[Any] = []
    ring.append(ring)
    return ring


def deep() -> list[Any]:
    inner: list[Any] = []
    for _ in range(100_000):
        inner = [inner]
    return inner


@pytest.mark.parametrize(
    "make",
    [
        object,
        lambda: {"a": object()},
        lambda: {1, 2},
        endless,
        deep,
        lambda: "\ud800",
        lambda: b"x" * 65521,
        lambda: f"{0:65521}",
    ],
)
def test_what_is_no_message(make: Callable[[], Any]) -> None:
    with pytest.raises(ArgumentError, match="^data: "):
        payload(make())


def message(data: bytes, sent: list[Any] | None = None) -> Message:
    return Message(data, 7, 2, 9, "lamp", lambda *arguments: sent is not None and sent.append(arguments))


def test_a_message() -> None:
    sent: list[Any] = []
    assert message(b'{"a":1}').json == {"a": 1}
    assert message(b"\xc3\xa4\xff").text == "ä\ufffd"
    message(b"", sent).reply({"b": 2})
    assert sent == [({"b": 2}, 7, 9)]


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 60_000])
def test_an_error_names_the_sender_of_invalid_json(data: bytes) -> None:
    with pytest.raises(ValueError, match="^a message from 7 to 'lamp' is not JSON: "):
        _ = message(data).json


def test_requests_find_their_answers() -> None:
    requests, sent = Requests(), []
    asking = [gevent.spawn(requests.ask, etid, sent.append, 5) for etid in (4, 5)]
    gevent.idle()
    first, second = sent
    assert not requests.take(b"forged", 5, first)
    assert not requests.take(b"news", 4, 0)
    assert requests.take(b"two", 5, second)
    assert requests.take(b"one", 4, first)
    assert [one.get(timeout=1) for one in asking] == [(b"one", first), (b"two", second)]
    assert requests.take(b"once more", 4, first)


def test_a_late_answer_is_nobodys() -> None:
    requests, sent = Requests(), []
    with pytest.raises(NoAnswer, match="^no answer from 4 in 0.01 s$"):
        requests.ask(4, sent.append, 0.01)
    assert requests.take(b"late", 4, sent[0])
    for _ in range(REMEMBERED_REQUESTS):
        with pytest.raises(TimeoutError):
            requests.ask(4, sent.append, 0)
    assert not requests.take(b"very late", 4, sent[0])


def test_a_request_can_be_given_up() -> None:
    requests = Requests()
    asking = [gevent.spawn(requests.ask, etid, bool, 5) for etid in (4, 5)]
    gevent.idle()
    requests.give_up("4 is gone", 4)
    requests.give_up("4 is gone again", 4)
    with pytest.raises(NoAnswer, match="^4 is gone$"):
        asking[0].get(timeout=1)
    requests.give_up("the hub has been closed")
    with pytest.raises(NoAnswer, match="^the hub has been closed$"):
        asking[1].get(timeout=1)


def test_the_time_limit_of_the_caller_is_its_own() -> None:
    with pytest.raises(gevent.Timeout) as raised, gevent.Timeout(0.01):
        Requests().ask(4, bool, 5)
    assert raised.value.seconds == 0.01
