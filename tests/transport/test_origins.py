"""Origins and Host names: those that are the same, and the lists of them."""

from __future__ import annotations

import time

import pytest

from smqrt.errors import ArgumentError
from smqrt.transport.origins import Hosts, Origins, host_name, is_loopback, same_origin

SAME = [
    ("http://example.com", "example.com", False),
    ("http://example.com:80", "example.com", False),
    ("http://example.com", "example.com:80", False),
    ("http://EXAMPLE.com:9357", "example.COM:9357", False),
    ("https://example.com", "example.com", True),
    ("https://example.com", "example.com:443", True),
    ("https://example.com", "example.com", False),  # a proxy took TLS off
    ("http://[::1]:9357", "[0:0:0:0:0:0:0:1]:9357", False),
    ("http://127.0.0.1:9357", "127.0.0.1:9357", False),
    ("http://xn--bcher-kva.example", "xn--BCHER-kva.example.", False),
]
FOREIGN = [
    ("http://evil.example", "example.com", False),
    ("http://example.com:8080", "example.com", False),
    ("http://example.com", "example.com:9357", False),
    ("http://example.com", "example.com", True),  # over TLS only pages that came over TLS
    ("https://example.com", "example.com:80", False),
    ("http://example.com.evil.example", "example.com", False),
    ("http://evil-example.com", "example.com", False),
    ("http://user@example.com", "example.com", False),
    ("http://example.com/", "example.com", False),
    ("chrome-extension://example.com", "example.com", False),
    ("file://", "example.com", False),
    ("null", "example.com", False),
    ("", "example.com", False),
    ("null", "null", False),
    ("http://", "", False),
    ("http://localhost:9357", "127.0.0.1:9357", False),
]


@pytest.mark.parametrize(("origin", "host", "secure"), SAME)
def test_the_same(origin: str, host: str, secure: bool) -> None:
    assert same_origin(origin, host, secure)


@pytest.mark.parametrize(("origin", "host", "secure"), FOREIGN)
def test_foreign(origin: str, host: str, secure: bool) -> None:
    assert not same_origin(origin, host, secure)


def test_a_list_of_origins() -> None:
    origins = Origins("https://example.com, http://*.lan:8080, https://bücher.example, HTTPS://Upper.example:443/")
    good = ["https://example.com", "https://EXAMPLE.com:443", "http://a.lan:8080", "http://a.b.lan:8080"]
    good += ["https://xn--bcher-kva.example", "https://upper.example"]
    assert all(map(origins.has, good))
    bad = ["http://example.com", "https://www.example.com", "http://lan:8080", "http://a.lan", "null", ""]
    assert not any(map(origins.has, bad))


def test_all_and_null() -> None:
    assert all(map(Origins("*").has, ["https://anything.example", "null", "file://", "nonsense"]))
    assert Origins(["null"]).has("null")
    assert not Origins(["null"]).has("https://example.com")
    assert not Origins().has("https://example.com")


@pytest.mark.parametrize("entry", ["example.com", "https://", "https://a/b", "https://u@a", "https://a:b"])
def test_what_is_no_origin(entry: str) -> None:
    with pytest.raises(ArgumentError, match="is not an origin; write https://example.com"):
        Origins(entry)
    with pytest.raises(ArgumentError, match="string expected"):
        Origins([1])  # type: ignore[list-item]


def test_a_list_of_hosts() -> None:
    hosts = Hosts("example.com, *.lan, 192.0.2.1, 2001:DB8::1, bücher.example")
    names = ["EXAMPLE.com:9357", "example.com.", "a.b.lan", "xn--bcher-kva.example"]
    for header in (*names, "192.0.2.1:80", "[2001:db8:0::1]:9"):
        assert hosts.has(host_name(header)), header
    for header in ("www.example.com", "lan", "192.0.2.2", "evil.example", ""):
        assert not hosts.has(host_name(header)), header
    assert Hosts("*").has("anything")
    assert not Hosts("")


@pytest.mark.parametrize("entry", ["https://example.com", "example.com:80", "a/b"])
def test_what_is_no_host(entry: str) -> None:
    with pytest.raises(ArgumentError, match="is not a host name; write example.com"):
        Hosts(entry)


def test_loopback_names() -> None:
    own = ["localhost", "LOCALHOST:9357", "localhost.", "app.localhost"]
    for header in (*own, "127.0.0.1", "127.9.9.9:1", "[::1]:9357", "[::ffff:127.0.0.1]"):
        assert is_loopback(host_name(header)), header
    others = ["localhost.evil.example", "evil-localhost", "127.0.0.1.nip.example"]
    for header in (*others, "128.0.0.1", "0.0.0.0", "[::]", "127.1", ""):
        assert not is_loopback(host_name(header)), header


@pytest.mark.parametrize("shape", ["http://{}", "http://[{}", "{}://a", "http://a:{}"])
@pytest.mark.parametrize("letter", ["a", ".", ":", "1", "-"])
def test_sixteen_kilobytes_are_checked_quickly(shape: str, letter: str) -> None:
    """As much as a head may hold."""
    text = shape.format(letter * 16000)
    origins, hosts = Origins("https://*.example.com, http://a"), Hosts("*.example.com, a")
    begin = time.process_time()
    origins.has(text)
    same_origin(text, text, False)
    is_loopback(host_name(text)) or hosts.has(host_name(text))
    assert time.process_time() - begin < 0.02
