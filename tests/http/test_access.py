"""Pages of other hosts, and names that are not ours, are refused with 403 and a line that names the setting."""

from __future__ import annotations

import _socket
import logging
from collections.abc import Callable

import pytest
from gevent import socket

from smqrt.http.access import HOSTS, Access
from smqrt.http.message import Request
from smqrt.transport.origins import Hosts, Origins
from tests.http.http_bench import Answer, Bench


@pytest.fixture
def ask(bench: Bench) -> Callable[..., int]:
    """`ask("POST", origin=…, host=…)` gives the status."""

    def send(method: str = "GET", host: str | None = "test", origin: str | None = None, version: str = "1.1") -> int:
        fields = (f"Host: {host}\r\n" if host is not None else "") + (f"Origin: {origin}\r\n" if origin else "")
        body = "Content-Length: 2\r\n\r\nhi" if method == "POST" else "\r\n"
        wire = bench.connect().send(f"{method} / HTTP/{version}\r\n{fields}{body}".encode())
        return wire.answer(method).status

    bench.handle(lambda request, relpath: request.response.write(b"done"))
    return send


def test_what_changes_something_is_for_own_pages(ask: Callable[..., int]) -> None:
    assert ask("POST") == 200
    assert ask("POST", origin="http://test") == 200
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert ask(method, origin="http://evil.example") == 403
        assert ask(method, origin="null") == 403
    for method in ("GET", "HEAD", "OPTIONS"):
        assert ask(method, origin="http://evil.example") == 200


def test_a_list_opens_it(bench: Bench, ask: Callable[..., int]) -> None:
    bench.server.access = Access(Origins("https://friend.example"))
    assert ask("POST", origin="https://friend.example") == 200
    assert ask("POST", origin="https://other.example") == 403


def test_loopback_answers_to_its_own_names(bench: Bench, ask: Callable[..., int]) -> None:
    bench.server.access = Access(loopback=True)
    for host in ("localhost", "localhost:9357", "app.localhost", "127.0.0.1:9357", "[::1]:9357"):
        assert ask(host=host) == 200
        assert ask(host=host) == 200  # remembered
    for host in ("evil.example", "evil.example:9357", "localhost.evil.example", "192.0.2.1"):
        assert ask(host=host) == 403
        assert ask("POST", host=host, origin=f"http://{host}") == 403
    assert ask(host=None, version="1.0") == 200


def test_hosts_are_a_setting(bench: Bench, ask: Callable[..., int]) -> None:
    bench.server.access = Access(hosts=Hosts("example.com"), loopback=True)
    assert [ask(host=host) for host in ("example.com:80", "localhost", "evil.example")] == [200, 200, 403]
    bench.server.access = Access(hosts=Hosts("*"), loopback=True)
    assert ask(host="anything.example") == 200
    bench.server.access = Access(hosts=Hosts("example.com"))
    assert [ask(host=host) for host in ("example.com", "evil.example")] == [200, 403]


def test_one_line_names_the_setting(bench: Bench, ask: Callable[..., int], caplog: pytest.LogCaptureFixture) -> None:
    bench.server.access = Access(hosts=Hosts("test"))
    with caplog.at_level(logging.WARNING, "smqrt"):
        for _ in range(20):
            ask("POST", origin="https://evil.example")
    [line] = caplog.messages
    assert line == (
        "refused: POST '/' from a page of 'https://evil.example' for 'test': "
        "to allow it, set origins=https://evil.example; see the setting origins"
    )
    caplog.clear()
    bench.server.access = Access(hosts=Hosts("test"))
    ask(host="evil.example:80")
    assert caplog.messages == [
        "refused: GET '/' for the host 'evil.example:80': to allow it, set hosts=evil.example; see the setting hosts"
    ]
    assert HOSTS.count == 1


def test_the_line_has_no_control_characters(
    bench: Bench, ask: Callable[..., int], caplog: pytest.LogCaptureFixture
) -> None:
    wire = bench.connect().send(b"POST /%1b%5d HTTP/1.1\r\nHost: test\r\nOrigin: http://\x9b31m\r\n\r\n")
    assert wire.answer().status == 400  # never in a path
    wire = bench.connect().send(b"POST / HTTP/1.1\r\nHost: test\r\nOrigin: http://\x9b31m\r\n\r\n")
    assert wire.answer().status == 403
    assert all(message.isprintable() for message in caplog.messages)


def test_long_ones_are_cut_and_not_kept(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.server.access = access = Access(loopback=True)
    bench.handle(lambda request, relpath: request.response.write(b"done"))
    long = "a" * 5000
    fields = f"Host: {long}.localhost\r\nOrigin: http://{long}\r\nContent-Length: 0\r\n"
    assert bench.connect().send(f"POST /{long} HTTP/1.1\r\n{fields}\r\n".encode()).answer().status == 403
    [line] = caplog.messages
    assert len(line) < 1200
    assert not access._accepted_hosts


def _shown(access: Access, bench: Bench, head: str) -> bool:
    seen: list[bool] = []

    def look(request: Request, relpath: str) -> None:
        seen.append(access.shows_errors(request))

    directory = bench.handle(look)
    answer: Answer = bench.connect().send(f"GET / HTTP/1.1\r\n{head}\r\n".encode()).answer()
    directory.unlink()
    assert answer.status == 200
    return seen[0]


def test_visibility_of_errors(bench: Bench) -> None:
    assert _shown(Access(debug=True), bench, "Host: example.com\r\n")
    assert not _shown(Access(debug=False, loopback=True), bench, "Host: localhost\r\n")
    assert not _shown(Access(debug=None), bench, "Host: localhost\r\n")
    home = Access(debug=None, loopback=True)
    assert _shown(home, bench, "Host: localhost:9357\r\n")
    assert not _shown(home, bench, "Host: example.com\r\n")
    assert not _shown(home, bench, "Host: localhost\r\nX-Forwarded-For: 192.0.2.1\r\n")


def test_a_separate_listener_accepts_other_names(bench: Bench) -> None:
    """An application may open further ports: what counts is where the connection came in."""
    bench.server.access = Access(loopback=True)
    bench.handle(lambda request, relpath: request.response.write(b"done"))
    ours, theirs = socket.socketpair()
    transport = _Elsewhere(fileno=ours.detach())
    transport.setblocking(False)
    bench.server.accepted(transport, ("192.0.2.7", 1))
    theirs.sendall(b"GET / HTTP/1.1\r\nHost: example.com\r\nConnection: close\r\n\r\n")
    assert theirs.recv(100).startswith(b"HTTP/1.1 200 ")
    theirs.close()


class _Elsewhere(_socket.socket):
    """A socket that was accepted at another address of this machine."""

    def getsockname(self) -> tuple[str, int]:
        return "192.0.2.1", 80
