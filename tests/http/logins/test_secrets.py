"""Secrets of the logins: no answer, and no work behind it, tells an unknown user from a wrong password."""

from __future__ import annotations

import re
from collections.abc import Callable
from hashlib import md5
from typing import Any

import pytest

from smqrt.http.logins import Account, Authenticator, UserTable, credentials
from smqrt.http.logins.credentials import UNKNOWN_USER, ClearText, Credentials, Digest, FormHash
from smqrt.http.sessions import HttpSession, cookie_field
from tests.http.http_bench import Bench, Wire
from tests.support.digest import authorization, challenges

REALM = "Barracuda Server"
HA1 = md5(f"ann:{REALM}:secret".encode()).hexdigest()
ACCOUNTS = {"a password": Account(password="secret"), "an HA1": Account(ha1=HA1), "nobody": UNKNOWN_USER}
FIELDS = {"nonce": "n", "nc": "00000001", "cnonce": "c", "uri": "/", "response": "0" * 32}
GIVEN: dict[str, Credentials] = {
    "clear text": ClearText("ann", "wrong"),
    "a hash": FormHash("ann", "0" * 40, "1", "k"),
    "digest": Digest("ann", FIELDS, "GET", "MD5", 1),
}


@pytest.mark.parametrize("given", GIVEN)
def test_the_work_is_the_same_for_every_account(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def counted(module: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(module, name)

        def count(*args: Any, **options: Any) -> Any:
            done.append(name)
            return function(*args, **options)

        monkeypatch.setattr(module, name, count)

    for module, names in ((credentials, ("md5", "sha256", "compare_digest")), (credentials, ("md5", "sha1", "sha256"))):
        for name in names:
            counted(module, name)
    work = {}
    for account, stored in ACCOUNTS.items():
        done.clear()
        credentials._ha2.cache_clear()  # the hash of the method and the URL, for all accounts
        assert not GIVEN[given].proves(stored, REALM), account
        work[account] = sorted(done)
    assert work["a password"] == work["nobody"] == work["an HA1"]
    assert work["nobody"]


def form(wire: Wire, name: str, password: str) -> tuple[int, dict[str, str], bytes]:
    body = f"ba_username={name}&ba_password={password}"
    kind = "Content-Type: application/x-www-form-urlencoded"
    wire.send(f"POST / HTTP/1.1\r\nHost: test\r\n{kind}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    answer = wire.answer()
    return answer.status, answer.fields, answer.body


def test_the_answer_is_the_same_for_every_name(bench: Bench) -> None:
    told = []

    def page(request: Any, info: Any) -> None:
        told.append((info.username, info.upwd))
        request.response.write(b"wrong")

    directory = bench.handle(lambda request, relpath: False)
    directory.setauth(Authenticator(UserTable({"ann": "secret"}), "form", page=page))
    wire = bench.connect()
    known, unknown = form(wire, "ann", "wrong"), form(wire, "bob", "wrong")
    known[1].pop("date"), unknown[1].pop("date")
    assert known == unknown
    assert told == [("ann", "secret"), ("bob", None)], "the page alone knows more"


def test_a_name_or_a_password_that_is_too_long(bench: Bench) -> None:
    bench.handle(lambda request, relpath: False).setauth(Authenticator({"ann": "x" * 1024}, "form"))
    for name, password, status in (("ann", "x" * 1024, 302), ("ann", "x" * 1025, 413), ("a" * 1025, "x", 413)):
        assert form(bench.connect(), name, password)[0] == status


def test_a_challenge_is_the_same_for_every_name(bench: Bench) -> None:
    directory = bench.handle(lambda request, relpath: False)
    directory.setauth(Authenticator({"ann": "secret"}, "basic"))
    wire = bench.connect()
    answers = [
        wire.ask("/", headers=f"Authorization: Basic {secret}\r\n")
        for secret in ("YW5uOndyb25n", "Ym9iOndyb25n", "!!!", "Ym9i", "")
    ]
    assert len({(answer.status, answer.fields["www-authenticate"], answer.body) for answer in answers}) == 1


def test_secure_cookies_are_sent_over_tls_only() -> None:
    session = HttpSession("id", 1, "127.0.0.1", 0, 0)
    assert cookie_field(session, True).endswith("; HttpOnly; SameSite=Lax; Secure")
    assert cookie_field(session, False).endswith("; HttpOnly; SameSite=Lax")


def test_a_401_to_a_large_body_does_not_hang(bench: Bench) -> None:
    directory = bench.handle(lambda request, relpath: False)
    directory.setauth(Authenticator({"ann": "secret"}))
    wire = bench.connect()
    wire.send(b"PUT /x HTTP/1.1\r\nHost: test\r\nContent-Length: 100000000\r\n\r\n" + b"x" * 200_000)
    assert wire.answer().status == 401
    wire.close()
    wire = bench.connect()
    wire.send(b"PUT /x HTTP/1.1\r\nHost: test\r\nContent-Length: 5\r\n\r\nhello")
    assert wire.answer().status == 401
    assert wire.ask("/x").status == 401, "the connection goes on"


@pytest.mark.parametrize(
    "field",
    [
        "Digest",
        "Digest " + "a" * 4000,
        "Digest " + 'a="' * 1300,
        "Digest " + 'a="\\"' * 800,
        'Digest username="ann", username="ann"',
        "Digest nc=00000001",
        "Digest " + " ," * 2000,
        "Basic " + "A" * 4000,
        "Basic " + "A" * 15000,
        "Bearer x",
    ],
)
def test_malformed_fields_are_no_credentials(bench: Bench, field: str) -> None:
    directory = bench.handle(lambda request, relpath: False)
    directory.setauth(Authenticator({"ann": "secret"}, "dav"))
    assert bench.connect().ask("/", headers=f"Authorization: {field}\r\n").status == 401


@pytest.mark.parametrize("text", ["{}", "{}  ,", " {}"])
def test_unusual_forms_of_digest(bench: Bench, text: str) -> None:
    """Commas and escapes in values, capitals, spaces around the equals sign."""
    bench.handle(lambda request, relpath: False).setauth(Authenticator({'a "b", c\\': "secret", "ä€": "secret"}))
    wire = bench.connect()
    lines = wire.ask("/").head.decode().split("\r\n")
    challenge = challenges([line for line in lines if "WWW-Auth" in line])["MD5"]
    for count, name in enumerate(('a "b", c\\', "ä€"), 1):
        field = authorization(challenge, name, "secret", "/x", count=count)
        quoted = name.replace("\\", "\\\\").replace('"', '\\"')
        field = field.replace(f'username="{name}"', f'Username = "{quoted}"').removeprefix("Digest ")
        wire.send(f"GET /x HTTP/1.1\r\nHost: test\r\nAuthorization: Digest {text.format(field)}\r\n\r\n".encode())
        assert wire.answer().status == 302, field


@pytest.mark.parametrize(
    "other", [{"uri": "/other"}, {"realm": "other"}, {"nonce": "other"}, {"algorithm": "MD5-sess"}]
)
def test_digest_for_something_else(bench: Bench, other: dict[str, str]) -> None:

    bench.handle(lambda request, relpath: False).setauth(Authenticator({"ann": "secret"}))
    wire = bench.connect()
    head = wire.ask("/").head.decode()
    challenge = challenges([line for line in head.split("\r\n") if "WWW-Auth" in line])["MD5"]
    right = authorization(challenge, "ann", "secret", "/")
    assert (
        wire.ask("/", headers=f"Authorization: {authorization(challenge, 'ann', 'secret', '/', **other)}\r\n").status
        == 401
    )
    assert wire.ask("/", headers=f"Authorization: {right}\r\n").status == 404


def test_a_challenge_reveals_nothing_about_a_name(bench: Bench) -> None:
    """A user with an HA1 can't use SHA-256; a client that does all the same doesn't learn who that is."""
    table = UserTable({"ann": {"pwd": [HA1]}, "eve": "secret"})
    directory, told = bench.handle(lambda request, relpath: False), set()
    wire = bench.connect()
    for name in ("nobody", "ann", "eve"):
        directory.setauth(Authenticator(table, "digest"))  # another one: it remembers that there are such users
        challenge = {"algorithm": "SHA-256", "realm": REALM, "nonce": bench.server.logins.nonces.issue()}
        answer = wire.ask("/", headers=f"Authorization: {authorization(challenge, name, 'wrong', '/')}\r\n")
        fields = re.findall("WWW-Authenticate: .*", answer.head.decode())
        told.add(re.sub('nonce="[^"]*"', "", "".join(fields)))
    assert len(told) == 1, told
