"""Header fields and the values that have a form of their own, without a connection."""

from __future__ import annotations

import pytest

from smqrt.http.headers import Headers, Span, date_line, http_date, parse_date, parse_ranges, set_cookie_field


def test_a_field_keeps_its_place_and_its_spelling() -> None:
    headers = Headers()
    headers.set("X-One", "1")
    headers.set("x-two", "2")
    headers.set("x-ONE", "3")
    headers.add("X-Two", "4")
    assert list(headers) == [("x-ONE", "3"), ("x-two", "2"), ("X-Two", "4")]
    assert headers.get("X-TWO") == "2"
    assert headers.get("X-Three", "none") == "none"
    headers.remove("x-two")
    assert "X-Two" not in headers
    headers.clear()
    assert not headers


def test_copies_and_merged_fields_are_independent() -> None:
    headers, others = Headers({"X": "1"}), Headers({"x": "2", "Y": "3"})
    copied = headers.copy()
    headers.add_missing(others)
    assert list(headers) == [("X", "1"), ("Y", "3")]
    headers.merge(others)
    headers.add("Y", "4")
    assert list(headers) == [("x", "2"), ("Y", "3"), ("Y", "4")]
    assert list(copied) == [("X", "1")]
    assert list(others) == [("x", "2"), ("Y", "3")]


def test_the_framing_is_the_servers_own() -> None:
    headers = Headers()
    headers.set("Content-Length", "5")
    headers.set("Connection", "Keep-Alive, Close")
    headers.set("X", "ä")
    assert headers.encode() == "X: ä\r\n".encode("latin-1")
    assert headers.has_token("connection", "close")
    assert not headers.has_token("connection", "clo")
    with pytest.raises(ValueError, match="Transfer-Encoding"):
        headers.set("Transfer-Encoding", "chunked")


@pytest.mark.parametrize(("name", "value"), [("X Y", "a"), ("", "a"), ("X", "a\r\nY: b"), ("X", "\0"), ("X", "€")])
def test_no_field_splits_the_head(name: str, value: str) -> None:
    headers = Headers()
    with pytest.raises(ValueError, match="header"):
        headers.add(name, value)
    assert not headers


def test_dates_there_and_back() -> None:
    assert http_date(784111777) == "Sun, 06 Nov 1994 08:49:37 GMT"
    assert parse_date("Sun, 06 Nov 1994 08:49:37 GMT") == 784111777
    assert parse_date("yesterday") is None
    assert date_line().startswith(b"Date: ")
    assert date_line().endswith(b" GMT\r\n")


@pytest.mark.parametrize(
    ("header", "spans"),
    [
        ("bytes=0-4", [Span(0, 5)]),
        ("bytes=5-", [Span(5, 10)]),
        ("bytes=-3", [Span(7, 10)]),
        ("Bytes=0-0, 9-99", [Span(0, 1), Span(9, 10)]),
        ("bytes=10-", []),
        ("bytes=4-2", None),
        ("bytes=-", None),
        ("lines=0-1", None),
        ("bytes=0-9,0-9", None),
        ("bytes=" + ",".join(["0-0"] * 11), None),
    ],
)
def test_ranges_of_ten_bytes(header: str, spans: list[Span] | None) -> None:
    assert parse_ranges(header, 10) == spans


def test_a_cookie_is_refused_before_it_can_become_two() -> None:
    assert set_cookie_field("a", "1", {"Path": "/", "Secure": None}) == "a=1; Path=/; Secure"
    with pytest.raises(ValueError, match="semicolon"):
        set_cookie_field("a", "1; b=2", {})
    with pytest.raises(ValueError, match="not a token"):
        set_cookie_field("a b", "1", {})
