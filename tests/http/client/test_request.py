"""Requests of the HTTP client: their URLs, heads and bodies."""

from __future__ import annotations

import pytest

from smqrt.errors import StreamError
from smqrt.http.client.exchange import joined, url_of


@pytest.mark.parametrize(
    ("text", "authority", "target"),
    [
        ("http://a.example", "a.example", "/"),
        ("HTTP://A.Example:80/x", "a.example", "/x"),
        ("https://a.example:443?q", "a.example", "/?q"),
        ("https://a.example:80/", "a.example:80", "/"),
        ("ws://[::1]:8080/x#f", "[::1]:8080", "/x"),
        ("http://bücher.example/ä b?ü=%20", "xn--bcher-kva.example", "/%C3%A4%20b?%C3%BC=%20"),
        ("http://a.example/a%2Fb%zz", "a.example", "/a%2Fb%zz"),
    ],
)
def test_parse(text: str, authority: str, target: str) -> None:
    url = url_of(text)
    assert (url.authority, url.target) == (authority, target)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a.example",
        "/path",
        "ftp://a/",
        "http://",
        "http://:80/",
        "http://a:99999/",
        "http://a:x/",
        "http://a b/",
        "http://a/\r\nX: y",
        "http://[::1/",
    ],
)
def test_refused(text: str) -> None:
    with pytest.raises(StreamError, match="invalidurl"):
        url_of(text)


@pytest.mark.parametrize(
    ("base", "location", "url"),
    [
        ("http://a.example/x/y?q", "z", "http://a.example/x/z"),
        ("http://a.example/x/y", "/z?p", "http://a.example/z?p"),
        ("https://a.example/x", "//b.example/z", "https://b.example/z"),
        ("http://a.example/x", "https://b.example:8443", "https://b.example:8443/"),
        ("http://a.example/x/y", "", "http://a.example/x/y"),
    ],
)
def test_join(base: str, location: str, url: str) -> None:
    assert str(joined(url_of(base), location)) == url


def test_join_refuses_other_worlds() -> None:
    with pytest.raises(StreamError, match="invalidurl"):
        joined(url_of("http://a.example/"), "javascript:alert(1)")


def test_query_and_login() -> None:
    url = url_of("http://me:p%40ss@a.example/x?a=1", [(b"b", b"1&2"), (b"\xc3\xa4", b"")])
    assert (url.user, url.password) == ("me", "p@ss")
    assert url.target == "/x?a=1&b=1%262&%C3%A4="
    assert "p@ss" not in str(url)
