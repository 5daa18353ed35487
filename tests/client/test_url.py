import pytest

from smqrt.client.url import parse_url
from smqrt.errors import ArgumentError


def test_default_ports_and_path():
    endpoint = parse_url("https://example.com")
    assert (endpoint.port, endpoint.target, endpoint.secure, endpoint.websocket) == (443, "/", True, False)
    assert endpoint.authority == "example.com"


def test_query_port_and_websocket():
    endpoint = parse_url("ws://[::1]:9357/a b/smq.lsp?x=1")
    assert (endpoint.host, endpoint.target) == ("::1", "/a%20b/smq.lsp?x=1")
    assert endpoint.authority == "[::1]:9357"
    assert str(endpoint) == "ws://[::1]:9357/a%20b/smq.lsp?x=1"


def test_user_becomes_basic_authorization():
    assert parse_url("http://joe:p%40ss@host/").authorization == "Basic am9lOnBAc3M="


@pytest.mark.parametrize(
    "url", ["", "host/path", "ftp://host/", "http://", "http://h:99999/", "http://h:x/", "http://[::1/"]
)
def test_bad_urls_are_named(url):
    with pytest.raises(ArgumentError, match="url"):
        parse_url(url)


def test_no_header_can_be_smuggled_by_the_url():
    with pytest.raises(ArgumentError, match="url"):
        parse_url("http://ho\x0bst/ x")
    assert "\r" not in parse_url("http://host/a\r\nEvil: 1").target
