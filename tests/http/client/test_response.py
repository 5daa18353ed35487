"""The HTTP client's responses: every way a body ends, cut anywhere, and what is not a response."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smqrt.errors import StreamError
from smqrt.http.client.exchange import MAX_FIELDS, MAX_FRAMING_BYTES, MAX_HEAD_BYTES, MAX_INTERIM, ClientResponse

LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: b\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A: b\r\n\r\n2;x=y\r\nhe\r\n3\r\nllo\r\n0\r\nX-T: t\r\n\r\n"
)
UNTIL_END = b"HTTP/1.0 200 OK\r\nX-A: b\r\n\r\nhello"
INTERIM = b"HTTP/1.1 100 Continue\r\nX-I: i\r\n\r\nHTTP/1.1 103 Hints\r\n\r\n" + LENGTH


def body(response: ClientResponse) -> bytes:
    return b"".join(iter(lambda: response.take(3), b""))


@given(whole=st.sampled_from([LENGTH, CHUNKED, UNTIL_END, INTERIM]), cuts=st.lists(st.integers(0, 150)))
def test_cut_anywhere(whole: bytes, cuts: list[int]) -> None:
    response = ClientResponse()
    at = 0
    for cut in sorted({*cuts, len(whole)}):
        if piece := whole[at:cut]:
            response.feed(piece)
        at = max(at, cut)
    if whole is UNTIL_END:
        assert not response.complete
        response.end()
    assert response.status == 200
    assert response.complete
    assert response.get("x-a") == "b"
    assert response.get("x-i") is None
    assert response.get("x-t") is None
    assert body(response) == b"hello"
    assert response.persistent is (whole is not UNTIL_END)


@pytest.mark.parametrize("whole", [LENGTH, CHUNKED, INTERIM])
def test_a_connection_that_ends_early(whole: bytes) -> None:
    for cut in range(len(whole)):
        response = ClientResponse()
        if cut:
            response.feed(whole[:cut])
        with pytest.raises(StreamError, match="socketclosed"):
            response.end()


@pytest.mark.parametrize("status", [b"204 No", b"304 Not"])
def test_statuses_without_a_body(status: bytes) -> None:
    response = ClientResponse()
    response.feed(b"HTTP/1.1 " + status + b"\r\n\r\n")
    assert response.complete
    assert response.persistent


def test_head_has_no_body() -> None:
    response = ClientResponse(bodiless=True)
    response.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")
    assert response.complete
    assert response.persistent
    assert response.take(9) == b""


@pytest.mark.parametrize(
    ("field", "version", "persistent"),
    [
        ("X: y", "1.1", True),
        ("Connection: close", "1.1", False),
        ("Connection: keep-alive", "1.0", True),
        ("X: y", "1.0", False),
    ],
)
def test_persistence(field: str, version: str, persistent: bool) -> None:
    response = ClientResponse()
    response.feed(f"HTTP/{version} 200 OK\r\n{field}\r\nContent-Length: 0\r\n\r\n".encode())
    assert response.persistent is persistent


@pytest.mark.parametrize("more", [b"HTTP/1.1 404 No\r\nX-A: no\r\nContent-Length: 2\r\n\r\nno", b"rubbish"])
def test_what_comes_uninvited_ends_persistence(more: bytes) -> None:
    response = ClientResponse()
    response.feed(LENGTH + more)
    assert (response.status, response.get("x-a")) == (200, "b")
    assert body(response) == b"hello"
    assert not response.persistent


def test_another_protocol() -> None:
    response = ClientResponse()
    response.feed(b"HTTP/1.1 101 x\r\nUpgrade: y\r\nConnection: upgrade\r\n\r\n\x81\x05hello")
    assert response.switches
    assert response.complete
    assert response.tail == b"\x81\x05hello"


@pytest.mark.parametrize(
    "rubbish",
    [
        b"220 mail.example\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n",
        b"HTTP/1.1 200 OK\r\nNo colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * MAX_HEAD_BYTES,
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * (MAX_FIELDS + 2) + b"\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * MAX_HEAD_BYTES,
        b"HTTP/1.1 100 x\r\n\r\n" * (MAX_INTERIM + 1) + b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: y\r\n" * MAX_FRAMING_BYTES,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"x" * (MAX_FRAMING_BYTES + 9),
    ],
)
def test_invalid_responses(rubbish: bytes) -> None:
    with pytest.raises(StreamError, match="invalidresponse"):
        ClientResponse().feed(rubbish)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_response_or_refused(data: bytes) -> None:
    for start in (b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"):
        try:
            ClientResponse().feed(start + data)
        except StreamError as error:
            assert error.word == "invalidresponse"  # noqa: PT017  # that nothing else is raised is the point


def test_a_head_read_byte_by_byte_costs_linear_time() -> None:
    def costs_s(field_bytes: int) -> float:
        head = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nX: " + b"y" * field_bytes + b"\r\n\r\n"
        response, began_s = ClientResponse(), time.process_time()
        for at in range(len(head)):
            response.feed(head[at : at + 1])
        assert response.complete
        return time.process_time() - began_s

    # Eight times the bytes cost eight times as much, and not sixty-four; what else the machine does comes and goes.
    assert any(costs_s(60_000) < 12 * costs_s(7_500) for _ in range(5))


def test_what_is_put_back_is_taken_next() -> None:
    response = ClientResponse()
    response.feed(LENGTH)
    response.put_back(b"ab" + response.take(2))
    assert body(response) == b"abhello"
    assert not response.has_data
