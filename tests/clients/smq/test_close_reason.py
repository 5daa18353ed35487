"""Close reasons: a word for programs, a sentence for people, and whether to come back."""

from __future__ import annotations

import pytest

from smqrt.clients.smq.protocol import disconnected, from_stream_error, refused
from smqrt.errors import CloseReason, StreamError
from smqrt.wire.smq import ConnackCode


def test_every_refusal_has_text_and_one_is_retried() -> None:
    ends = [refused(code, "") for code in ConnackCode if code]
    assert all(end.word and end.code for end in ends)
    assert [end.code for end in ends if end.can_reconnect] == [ConnackCode.SERVER_UNAVAILABLE]


def test_unknown_codes_and_terminal_escapes_are_printable() -> None:
    end = refused(99, "\x1b[2J")
    assert end.word == "refused with code 99"
    assert str(end) == r"the broker refused the connection: refused with code 99 (\x1b[2J)"


@pytest.mark.parametrize(
    ("text", "word", "can_reconnect"),
    [("", None, False), ("bye", "bye", False), (CloseReason.SHUTDOWN.value, CloseReason.SHUTDOWN.value, True)],
)
def test_disconnect(text: str, word: str | None, can_reconnect: bool) -> None:
    end = disconnected(text)
    assert (end.word, end.can_reconnect, end.by_broker) == (word, can_reconnect, True)


@pytest.mark.parametrize(
    ("word", "detail", "sentence", "can_reconnect"),
    [
        ("cannotconnect", "Connection refused", "x: connection refused; is the server running there?", True),
        ("cannotconnect", "no route", "x: no connection: no route", True),
        ("timeout", "whatever", "x: no answer in time", True),
        ("sslnottrusted", "expired", "x: certificate not trusted: expired", False),
        ("prxgeneral", "", "x: prxgeneral", True),
        ("socketreadfailed", "reset", "x: connection lost: reset", True),
    ],
)
def test_errors_of_sockets(word: str, detail: str, sentence: str, can_reconnect: bool) -> None:
    end = from_stream_error(StreamError(word, detail), "x")
    assert (end.word, str(end), end.can_reconnect) == (word, sentence, can_reconnect)
