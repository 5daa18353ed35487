"""The HTTP client's connection: when it is kept, when it is made anew, what it does with servers that go away."""

from __future__ import annotations

from time import monotonic
from typing import Any

import pytest

from smqrt.errors import ArgumentError, StreamError
from smqrt.http.client.client import HttpClientOptions, HttpConversation
from smqrt.http.client.exchange import ClientRequest, url_of
from tests.support.scripted_http import CLOSE, ScriptedHttp, answer, reset
from tests.support.waiting import wait_until

HELLO = answer(b"hello")
LAST = answer(b"hello", "200 OK", "Connection: close")


def get(client: HttpConversation, url: str, method: str = "GET", size: int | None = None) -> bytes:
    client.send_head(ClientRequest(method, url_of(url), size_bytes=size))
    client.status()
    return b"".join(iter(client.read, None))


@pytest.fixture
def client() -> HttpConversation:
    return HttpConversation(HttpClientOptions(timeout_s=3))


def test_kept(client: HttpConversation) -> None:
    with ScriptedHttp([HELLO] * 3) as scripted:
        assert [get(client, scripted.url) for _ in range(3)] == [b"hello"] * 3
        assert scripted.connections == 1


def test_not_kept() -> None:
    client = HttpConversation(HttpClientOptions(persistent=False, timeout_s=3))
    with ScriptedHttp([LAST], [LAST]) as scripted:
        assert [get(client, scripted.url) for _ in range(2)] == [b"hello"] * 2
        assert scripted.connections == 2
        assert all("Connection: close" in head for head in scripted.heads)


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("first", [LAST, [*HELLO, 0.05, CLOSE], [*HELLO, b"rubbish"], [*HELLO, 0.05, b"rubbish"]])
def test_made_anew_when_the_server_ended_it(client: HttpConversation, first: list[object], method: str) -> None:
    with ScriptedHttp([first], [HELLO]) as scripted:  # type: ignore[list-item]
        assert get(client, scripted.url) == b"hello"
        wait_until(lambda: scripted.answered)
        assert get(client, scripted.url, method, 0) == b"hello"
        assert scripted.connections == 2


def test_made_anew_when_the_body_was_not_read(client: HttpConversation) -> None:
    with ScriptedHttp([[b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\nabc"]], [HELLO]) as scripted:
        client.send_head(ClientRequest("GET", url_of(scripted.url)))
        client.status()
        assert get(client, scripted.url) == b"hello"
        assert scripted.connections == 2


@pytest.mark.parametrize("ending", [CLOSE, reset])
def test_a_get_is_repeated_when_a_reused_connection_closes(client: HttpConversation, ending: object) -> None:
    with ScriptedHttp([HELLO, [ending]], [HELLO]) as scripted:  # type: ignore[list-item]
        assert get(client, scripted.url) == b"hello"
        assert get(client, scripted.url) == b"hello"
        assert scripted.connections == 2
        assert len(scripted.heads) == 3


@pytest.mark.parametrize(("method", "size"), [("POST", 0), ("DELETE", None), ("GET", 3)])
def test_what_may_have_an_effect_is_not_repeated(client: HttpConversation, method: str, size: int | None) -> None:
    with ScriptedHttp([HELLO, [CLOSE]], [HELLO]) as scripted:
        get(client, scripted.url)
        client.send_head(ClientRequest(method, url_of(scripted.url), size_bytes=size))
        if size:
            client.write(b"abc")
        with pytest.raises(StreamError, match="socketclosed"):
            client.status()
        assert scripted.connections == 1


def test_a_first_request_is_not_repeated(client: HttpConversation) -> None:
    with ScriptedHttp([[CLOSE]]) as scripted:
        with pytest.raises(StreamError, match="socketclosed"):
            get(client, scripted.url)
        assert scripted.connections == 1


def test_an_answer_before_the_body_is_through(client: HttpConversation) -> None:
    early = [b"HTTP/1.1 413 Too much\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno"]
    with ScriptedHttp([early]) as scripted:
        client.send_head(ClientRequest("POST", url_of(scripted.url), [("Content-Length", "0"), ("X-Real", "endless")]))
        assert client.status() == 413


def test_interim_responses(client: HttpConversation) -> None:
    with ScriptedHttp([[b"HTTP/1.1 100 Continue\r\n\r\n", 0.02, *HELLO]]) as scripted:
        assert get(client, scripted.url) == b"hello"


def test_another_server_another_connection(client: HttpConversation) -> None:
    with ScriptedHttp([HELLO] * 2) as one, ScriptedHttp([HELLO]) as other:
        for url in (one.url, other.url, one.url):
            assert get(client, url) == b"hello"
        assert (one.connections, other.connections) == (2, 1)


@pytest.mark.parametrize(
    ("method", "headers"),
    [("G\r\nX: y", []), ("GET", [("X\r\nY", "z")]), ("GET", [("X", "y\r\nZ: z")]), ("GET", [("X", "\0")])],
)
def test_nothing_can_be_smuggled_in(method: str, headers: list[tuple[str, str]]) -> None:
    with pytest.raises(ArgumentError):
        ClientRequest(method, url_of("http://a.example"), headers)


def test_a_password_is_not_shown() -> None:
    request = ClientRequest("GET", url_of("http://a.example"), user="me", password="secret")
    assert "secret" not in repr(request)


def drip(data: bytes, every_s: float = 0.02) -> list[Any]:
    return [step for byte in data for step in (bytes([byte]), every_s)]


def test_a_head_that_drips_is_not_waited_for() -> None:
    client = HttpConversation(HttpClientOptions(timeout_s=0.2))
    with ScriptedHttp([drip(b"HTTP/1.1 200 OK\r\n" * 100)]) as scripted:
        began_s = monotonic()
        client.send_head(ClientRequest("GET", url_of(scripted.url)))
        with pytest.raises(StreamError, match="timeout"):
            client.status()
        assert monotonic() - began_s < 15, "the whole head takes 32 s"


def test_a_slow_body_delays_nothing_and_is_complete() -> None:
    client = HttpConversation(HttpClientOptions(timeout_s=0.2))
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n"
    with ScriptedHttp([[head, *drip(b"0123456789" * 50)]]) as scripted:
        client.send_head(ClientRequest("GET", url_of(scripted.url)))
        with pytest.raises(StreamError, match="timeout"):
            client.read_whole()
        assert client.read_whole(4) == b"0123"


def test_a_server_that_only_interrupts_is_not_waited_for() -> None:
    client = HttpConversation(HttpClientOptions(timeout_s=0.3))
    with ScriptedHttp([[b"HTTP/1.1 102 Wait\r\n\r\n", 0.1] * 300]) as scripted:
        began_s = monotonic()
        client.send_head(ClientRequest("GET", url_of(scripted.url)))
        with pytest.raises(StreamError, match="timeout"):
            client.status()
        assert monotonic() - began_s < 15, "the server goes on for 30 s"


@pytest.mark.parametrize("head", [b"Content-Length: 101", b"Transfer-Encoding: chunked", b"X: y"])
def test_a_body_over_the_limit(head: bytes) -> None:
    client = HttpConversation(HttpClientOptions(timeout_s=3, max_body_bytes=100))
    body = b"65\r\n" + b"x" * 101 + b"\r\n" if b"chunked" in head else b"x" * 101
    with ScriptedHttp([[b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n" + body]]) as scripted:
        client.send_head(ClientRequest("GET", url_of(scripted.url)))
        with pytest.raises(StreamError, match="toomuchdata"):
            client.read_whole()
        with pytest.raises(StreamError, match="socketclosed"):
            client.read_whole()


def test_a_large_file_may_be_asked_about() -> None:
    client = HttpConversation(HttpClientOptions(timeout_s=3, max_body_bytes=100))
    with ScriptedHttp([[b"HTTP/1.1 200 OK\r\nContent-Length: 101\r\n\r\n"]]) as scripted:
        client.send_head(ClientRequest("HEAD", url_of(scripted.url)))
        assert client.read_whole() == b""


def test_what_is_skipped_is_bounded(client: HttpConversation) -> None:
    with ScriptedHttp([answer(b"x" * 100)] * 3) as scripted:
        for max_bytes, connections in ((1000, 1), (50, 1), (1000, 2)):
            client.send_head(ClientRequest("GET", url_of(scripted.url)))
            client.status()
            client.skip(max_bytes)
            assert scripted.connections == connections


def test_trusted_without_tls_sends_nothing(client: HttpConversation) -> None:
    with ScriptedHttp([HELLO]) as scripted:
        with pytest.raises(StreamError, match="sslnotenabled"):
            client.send_head(ClientRequest("GET", url_of(scripted.url), trusted=True))
        assert scripted.connections == 0


@pytest.mark.parametrize("host", ["a\r\nX: y", "a\nb", "a b", "a\0", "", "a/b", "u@a", "ä.example"])
def test_the_host_smuggles_nothing_in(host: str) -> None:
    with pytest.raises(ArgumentError, match="host"):
        HttpClientOptions(host=host)
