"""Login pages under attack: guesses by the thousand, of one name and of many, from one address and from many."""

from __future__ import annotations

import re
import socket
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Callable

from tests.conftest import REPOSITORY
from tests.hostile.conftest import Attack, Besieged
from tests.support.digest import authorization, challenges

GUESSES = 1000
AT_ONCE = 50  # in one pipeline
Guess = Callable[[int], bytes]


def request(path: str, headers: str = "", body: str = "", method: str = "GET") -> bytes:
    form = f"Content-Type: application/x-www-form-urlencoded\r\nContent-Length: {len(body)}\r\n" if body else ""
    return f"{method} /logins/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{form}{headers}\r\n{body}".encode()


def form(path: str, name: str, password: str) -> bytes:
    return request(path, "", f"ba_username={name}&ba_password={password}", "POST")


def statuses(sock: socket.socket, data: bytes, count: int) -> list[str]:
    """Sends requests and gives the statuses of so many answers, which have no status line in their bodies."""
    sock.sendall(data)
    found: list[str] = []
    rest = b""
    while len(found) < count and (more := sock.recv(65536)):
        rest += more
        found += re.findall(r"HTTP/1\.1 (\d{3}) ", rest.decode("latin-1"))
        rest = rest[-12:] if b"HTTP/1.1" not in rest[-12:] else b""
    return found


def guesses(besieged: Besieged, attack: Attack, guess: Guess, addresses: int) -> Counter[str]:
    """Makes GUESSES guesses from so many addresses; gives how often which status came."""
    found: Counter[str] = Counter()
    for begin in range(0, GUESSES, AT_ONCE):
        data = b"".join(guess(at) for at in range(begin, begin + AT_ONCE))
        source = f"127.0.1.{begin // AT_ONCE % addresses + 1}"
        with socket.create_connection(("127.0.0.1", besieged.port), 20, (source, 0)) as sock:
            found.update(statuses(sock, data, AT_ONCE))
        attack.sent(len(data))
    return found


def a_challenge(besieged: Besieged) -> dict[str, str]:
    with besieged.open() as sock:
        sock.sendall(request("digest/x"))
        head = sock.recv(65536).decode()
    return challenges(re.findall(r"WWW-Authenticate: (.*)\r", head))["SHA-256"]


def test_a_thousand_guesses_a_second(besiege: Callable[..., Besieged]) -> None:
    besieged = besiege(REPOSITORY / "tests/apps/examples/logins")
    challenge = a_challenge(besieged)

    def basic(name: str, password: str) -> bytes:
        secret = b64encode(f"{name}:{password}".encode()).decode()
        return request("basic/x", f"Authorization: Basic {secret}\r\n")

    def digest(at: int) -> bytes:
        answer = authorization(challenge, "ann", f"guess{at}", "/logins/digest/x", count=at + 1)
        return request("digest/x", f"Authorization: {answer}\r\n")

    cases: dict[str, tuple[Guess, str]] = {
        "a form, one name": (lambda at: form("form/x", "ann", f"guess{at}"), "200"),
        "a form, many names": (lambda at: form("form/x", f"name{at}", "123456"), "200"),
        "Basic": (lambda at: basic("ann", f"guess{at}"), "401"),
        "Digest": (digest, "401"),
    }
    for name, (guess, wrong) in cases.items():
        for addresses in (1, 10):
            with besieged.attack(f"{GUESSES} guesses: {name}, {addresses} addresses") as attack:
                began_s = time.monotonic()
                found = guesses(besieged, attack, guess, addresses)
                lasted_s = time.monotonic() - began_s
            assert set(found) <= {wrong, "429"}, found
            assert found["429"] >= GUESSES - addresses * 60 - lasted_s * addresses, f"{found} in {lasted_s:.1f} s"
    with besieged.open() as sock:  # from an address that did nothing wrong
        assert statuses(sock, form("form/x", "ann", "secret"), 1) == ["302"]
    wait_for_a_slow_user_database(besieged)


def wait_for_a_slow_user_database(besieged: Besieged) -> None:
    """Guesses count while they wait, so nobody has hundreds of them under way."""
    socks = [besieged.open() for _ in range(200)]
    with besieged.attack("200 guesses at a slow user database") as attack:
        for sock in socks:
            sock.sendall(form("radius/x", "slow", "wrong"))
        answers = [sock.recv(65536)[9:12].decode() for sock in socks]
        attack.sent(200)
    for sock in socks:
        sock.close()
    found = Counter(answers)
    assert set(found) == {"200", "429"}
    assert found["200"] <= 12
