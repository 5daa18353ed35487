"""URLs: what requests need of them."""

from __future__ import annotations

import pytest

from smqrt.wire.url import basic_authorization, parse_url, split_url


def test_default_ports_and_path() -> None:
    url = parse_url("https://example.com")
    assert (url.port, url.target, url.secure, url.websocket) == (443, "/", True, False)
    assert url.authority == "example.com"


def test_query_port_and_websocket() -> None:
    url = parse_url("ws://[::1]:9357/a b/smq.lsp?x=1")
    assert (url.host, url.target) == ("::1", "/a%20b/smq.lsp?x=1")
    assert url.authority == "[::1]:9357"
    assert str(url) == "ws://[::1]:9357/a%20b/smq.lsp?x=1"


@pytest.mark.parametrize("query", ["a=1", "a=%20", "x?[]{}|^`\\"])
def test_a_query_stays_as_it_is(query: str) -> None:
    assert parse_url(f"http://host/?{query}").target == f"/?{query}"


def test_more_parameters_follow_the_query() -> None:
    assert parse_url("http://host/?a=1", "b=2").target == "/?a=1&b=2"
    assert parse_url("http://host/", "b=2").target == "/?b=2"


def test_the_user_is_decoded_and_never_shown() -> None:
    url = parse_url("http://joe:p%40ss@host/")
    assert (url.user, url.password) == ("joe", "p@ss")
    assert "joe" not in str(url)


def test_basic_authorization() -> None:
    assert basic_authorization("joe", "p@ss") == "Basic am9lOnBAc3M="
    assert basic_authorization("joe", None) == "Basic am9lOg=="


def test_a_name_of_any_script_becomes_idna() -> None:
    assert parse_url("http://Bücher.example/").host == "xn--bcher-kva.example"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "look like"),
        ("host/path", "look like"),
        ("ftp://host/", "look like"),
        ("http://", "look like"),
        ("http://h:99999/", "[Pp]ort"),
        ("http://h:x/", "[Pp]ort"),
        ("http://[::1/", "IPv6"),
        ("http://a b/", "host"),
    ],
)
def test_what_is_none(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_url(text)


def test_no_header_can_be_smuggled() -> None:
    with pytest.raises(ValueError, match="host"):
        parse_url("http://ho\x0bst/ x")
    assert "\r" not in parse_url("http://host/a\r\nEvil: 1").target


def test_parts_of_another_scheme() -> None:
    parts = split_url("MQTTS://u%3A:p@broker:8883")
    assert (parts.scheme, parts.host, parts.port, parts.user, parts.password) == ("mqtts", "broker", 8883, "u:", "p")


def test_each_scheme_has_its_default_port() -> None:
    ports = {scheme: parse_url(f"{scheme}://host/").port for scheme in ("http", "ws", "https", "wss")}
    assert ports == {"http": 80, "ws": 80, "https": 443, "wss": 443}
    assert [parse_url(f"{scheme}://host/").secure for scheme in ports] == [False, False, True, True]
    assert [parse_url(f"{scheme}://host/").websocket for scheme in ports] == [False, True, False, True]


def test_a_port_is_1_to_65535() -> None:
    assert parse_url("http://host:1/").origin == (False, "host", 1)
    assert parse_url("http://host:65535/").authority == "host:65535"
    with pytest.raises(ValueError, match="1 to 65535"):
        parse_url("http://host:0/")
