"""Options of a client and of its subscriptions, without a client."""

from __future__ import annotations

import logging

import pytest

from smqrt.clients.smq.options import SmqClientOptions, SubscriptionOptions, message_handler
from smqrt.errors import ArgumentError
from smqrt.settings.option_types import make


def test_every_client_has_a_uid_of_its_own() -> None:
    uids = {make(SmqClientOptions, {}).uid for _ in range(10)}
    assert len(uids) == 10
    assert all(len(uid) >= 6 for uid in uids)


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"uid": b"short"}, "uid"),
        ({"headers": {"a b": "x"}}, "a b"),
        ({"headers": {"a": "x\r\ny"}}, "a"),
        ({"u": 1}, "u"),
    ],
)
def test_what_is_refused(given: dict[str, object], word: str) -> None:
    with pytest.raises(ArgumentError, match=word):
        make(SmqClientOptions, given)


@pytest.mark.parametrize(
    ("datatype", "data", "value"), [(None, b"{}", b"{}"), ("text", b"\xc3\xa4", "ä"), ("json", b'{"a": 1}', {"a": 1})]
)
def test_messages_are_decoded(datatype: str | None, data: bytes, value: object) -> None:
    got: list[object] = []
    options = make(SubscriptionOptions, {"onmsg": lambda *message: got.append(message), "datatype": datatype})
    handler = message_handler(options, lambda *message: None)
    assert handler is not None
    handler(data, 1, 2, 3)
    assert got == [(value, 1, 2, 3)]


@pytest.mark.parametrize(("datatype", "data"), [("json", b"{"), ("json", b"[" * 100_000), ("text", b"\xff")])
def test_undecodable_messages_reach_the_general_handler(
    datatype: str, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    got: list[object] = []
    options = make(SubscriptionOptions, {"onmsg": lambda *message: None, "datatype": datatype})
    handler = message_handler(options, lambda *message: got.append(message))
    assert handler is not None
    with caplog.at_level(logging.WARNING):
        handler(data, 1, 2, 3)
    assert got == [(data, 1, 2, 3)]
    assert f"topic 2 is not {datatype}" in caplog.text


def test_without_onmsg_everything_is_the_general_handlers() -> None:
    assert message_handler(make(SubscriptionOptions, {"datatype": "json"}), lambda *message: None) is None
