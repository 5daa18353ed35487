"""Digest authentication: the examples of RFC 7616, and a client that is asked."""

from __future__ import annotations

import re

import pytest

from smqrt.http.client.client import Challenge, HttpClient, HttpClientOptions, find_challenge
from smqrt.http.client.exchange import ClientRequest, url_of
from tests.support.scripted_http import ScriptedHttp, answer

NONCE = "7ypf/xlj9XXwfDPEoM4URrv/xwf94BcCAzFZH4GiTo0v"
FIELDS = f'realm="http-auth@example.org", qop="auth, auth-int", nonce="{NONCE}", opaque="FQhe"'
CNONCE = "f2/wE4q74E6zIJEtWaHKaf5wv/H5QzzpXusqGemxURZJ"
ASKED = 'WWW-Authenticate: Digest realm="r", nonce="n", qop="auth"'


@pytest.mark.parametrize(
    ("algorithm", "proof"),
    [
        ("MD5", "8ca523f5e9506fed4657c9700eebdbec"),
        ("SHA-256", "753927fa0e85d155564e2e272a28d1802ca10daf4496794697cf8db5856cb6c1"),
    ],
)
def test_the_examples_of_the_standard(algorithm: str, proof: str) -> None:
    challenge = find_challenge(["Basic realm=x", f"Digest {FIELDS}, algorithm={algorithm}"])
    assert challenge
    text = challenge.answer("GET", "/dir/index.html", "Mufasa", "Circle of Life", CNONCE)
    assert f'response="{proof}"' in text
    assert 'opaque="FQhe"' in text
    assert "nc=00000001" in text
    assert "nc=00000002" in challenge.answer("GET", "/", "Mufasa", "x", CNONCE)


def test_old_servers_without_qop() -> None:
    challenge = find_challenge(['Digest realm="testrealm@host.com", nonce="dcd98b7102dd2f0e8b11d0f600bfb0c093"'])
    assert challenge
    text = challenge.answer("GET", "/dir/index.html", "Mufasa", "Circle Of Life")
    assert 'response="670fd8c2df070c60b045671b8b24ff02"' in text
    assert "qop" not in text


@pytest.mark.parametrize(
    "value",
    [
        "Basic realm=x",
        "Digest",
        'Digest realm="r"',
        f"Digest {FIELDS}, algorithm=X",
        'Digest realm="r", nonce="n", qop="auth-int"',
        "Digest nonsense",
        "Digest realm=, nonce=",
    ],
)
def test_what_can_not_be_met(value: str) -> None:
    assert find_challenge([value]) is None


def test_quotes_are_kept_in() -> None:
    text = Challenge({"realm": 'a"b', "nonce": "n"}).answer("GET", "/", 'm"e', "x")
    assert 'username="m\\"e"' in text
    assert 'realm="a\\"b"' in text


def get(client: HttpClient, url: str, user: str | None = "me", method: str = "GET") -> int:
    client.send_head(ClientRequest(method, url_of(url), size_bytes=None, user=user, password="secret"))
    return client.status()


def test_asked_once_then_known() -> None:
    client = HttpClient(HttpClientOptions(timeout_s=3))
    with ScriptedHttp([answer(b"who", "401 No", ASKED), answer(b"a"), answer(b"b")]) as scripted:
        assert [get(client, scripted.url + path) for path in ("/a", "/b")] == [200, 200]
        kinds = [re.findall(r"Authorization: (\w+)", head) for head in scripted.heads]
        assert kinds == [["Basic"], ["Digest"], ["Digest"]]
        assert 'uri="/b"' in scripted.heads[2]
        assert "nc=00000002" in scripted.heads[2]


def test_a_wrong_password_is_reported_after_two() -> None:
    client = HttpClient(HttpClientOptions(timeout_s=3))
    with ScriptedHttp([answer(b"who", "401 No", ASKED)] * 9) as scripted:
        assert get(client, scripted.url) == 401
        assert len(scripted.heads) == 2
        assert get(client, scripted.url) == 401
        assert len(scripted.heads) == 3


def test_a_stale_nonce_is_renewed() -> None:
    client = HttpClient(HttpClientOptions(timeout_s=3))
    renewed = answer(b"who", "401 No", ASKED.replace('"n"', '"m"') + ", stale=true")
    with ScriptedHttp([answer(b"who", "401 No", ASKED), answer(b"a"), renewed, answer(b"b")]) as scripted:
        assert [get(client, scripted.url) for _ in range(2)] == [200, 200]
        assert 'nonce="m"' in scripted.heads[3]


def test_no_credentials_and_other_schemes_are_ignored() -> None:
    client = HttpClient(HttpClientOptions(timeout_s=3))
    with ScriptedHttp(
        [answer(b"", "401 No", ASKED), answer(b"", "401 No", "WWW-Authenticate: Basic realm=x")]
    ) as scripted:
        assert [get(client, scripted.url, user) for user in (None, "me")] == [401, 401]
        assert len(scripted.heads) == 2


def test_the_proof_stays_with_its_server() -> None:
    client = HttpClient(HttpClientOptions(timeout_s=3))
    with ScriptedHttp([answer(b"away")]) as other:
        moved = answer(b"", "302 Found", f"Location: {other.url}")
        with ScriptedHttp([answer(b"who", "401 No", ASKED), moved]) as scripted:
            assert get(client, scripted.url) == 200
    assert "Authorization" not in other.heads[0]
