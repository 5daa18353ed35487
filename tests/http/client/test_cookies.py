"""The cookies of a client."""

from __future__ import annotations

import time

import pytest

from smqrt.http.client.client import MAX_COOKIE_BYTES, MAX_COOKIES, MAX_COOKIES_OF_HOST, CookieJar, parse_cookies
from smqrt.http.client.exchange import url_of

HERE = url_of("https://a.example/x/y")


def kept(*values: str, url: str = "https://a.example/x/z") -> str:
    jar = CookieJar()
    for value in values:
        jar.keep(HERE, [("Set-Cookie", value)])
    return jar.value(url_of(url))


@pytest.mark.parametrize(
    ("value", "url", "sent"),
    [
        ("a=1", "https://a.example/x/z", "a=1"),
        ("a=1", "https://a.example/", ""),
        ("a=1; Path=/", "https://a.example/", "a=1"),
        ("a=1; Path=/x", "https://a.example/xy", ""),
        ("a=1; Path=/x", "https://a.example/x?q", "a=1"),
        ("a=1; Path=/", "https://b.example/", ""),
        ("a=1; Path=/; Domain=example", "https://b.example/", ""),
        ("a=1; Path=/; Secure", "http://a.example/", ""),
        ("a=1; Path=/; Secure", "https://a.example/", "a=1"),
        ("a=1; Path=/; Max-Age=100", "https://a.example/", "a=1"),
        ("a=1; Path=/; Max-Age=0", "https://a.example/", ""),
        ("a=1; Path=/; Expires=Thu, 01 Jan 1970 00:00:00 GMT", "https://a.example/", ""),
        ("a=1; Path=/; Expires=rubbish", "https://a.example/", "a=1"),
        ("a=b=c; Path=/", "https://a.example/", "a=b=c"),
        ("rubbish", "https://a.example/x/z", ""),
        ("=x", "https://a.example/x/z", ""),
    ],
)
def test_what_goes_back(value: str, url: str, sent: str) -> None:
    assert kept(value, url=url) == sent


def test_replaced_forgotten_and_ordered() -> None:
    assert kept("a=1", "a=2") == "a=2"
    assert kept("a=1", "a=; Max-Age=-1") == ""
    assert kept("a=1; Path=/", "b=2; Path=/x") == "b=2; a=1"


def test_a_plain_connection_sets_no_secure_cookie() -> None:
    jar = CookieJar()
    jar.keep(url_of("http://a.example/"), [("set-cookie", "a=1; Secure; Path=/")])
    assert jar.value(url_of("https://a.example/")) == ""


def test_a_server_can_not_fill_the_memory() -> None:
    jar = CookieJar()
    jar.keep(HERE, [("Set-Cookie", f"c{number}=1") for number in range(10_000)])
    assert len(jar.value(HERE).split("; ")) == MAX_COOKIES_OF_HOST
    jar.keep(HERE, [("Set-Cookie", "big=" + "x" * MAX_COOKIE_BYTES)])
    assert "big" not in jar.value(HERE)
    many = [("Set-Cookie", f"c{number}=1") for number in range(MAX_COOKIES_OF_HOST)]
    for number in range(2 * MAX_COOKIES // MAX_COOKIES_OF_HOST):
        jar.keep(url_of(f"https://h{number}.example/"), many)
    assert len(jar._cookies) == MAX_COOKIES


def test_what_has_expired_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    jar = CookieJar()
    for number in range(MAX_COOKIES // 2):
        host = url_of(f"https://h{number}.example/")
        jar.keep(host, [("Set-Cookie", "a=1; max-age=1"), ("Set-Cookie", "b=1; max-age=99999")])
    jar.keep(HERE, [("Set-Cookie", "new=1")])
    assert jar.value(HERE) == ""
    later_s = time.time() + 2
    monkeypatch.setattr(time, "time", lambda: later_s)
    jar.keep(HERE, [("Set-Cookie", "new=1")])
    assert jar.value(HERE) == "new=1"


def test_a_life_beyond_all_numbers() -> None:
    jar = CookieJar()
    jar.keep(HERE, [("Set-Cookie", "a=1; max-age=" + "9" * 4000), ("Set-Cookie", "b=1; expires=" + "9" * 4000)])
    assert jar.value(HERE) == "a=1; b=1"


def test_parse_gives_what_is_set() -> None:
    assert [
        (one.name, one.value) for one in parse_cookies([("X", "y"), ("set-cookie", "a=1"), ("Set-Cookie", "b=2; x")])
    ] == [
        ("a", "1"),
        ("b", "2"),
    ]
