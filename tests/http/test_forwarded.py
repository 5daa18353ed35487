"""Header fields of proxies, and who is believed."""

from __future__ import annotations

import random
from time import process_time

import pytest

from smqrt.http.forwarded import AUTO, FORWARDED, X_FORWARDED, Proxies, find_client, node, of_forwarded
from smqrt.http.headers import BadRequest
from smqrt.transport.admission import TrustedNetworks

TRUSTED = TrustedNetworks(["10.0.0.0/8", "::1", "fd00::/8"])
PROXY, STRANGER = ("10.0.0.1", 555), ("203.0.113.9", 555)


class Asked:
    """A request, as far as proxies change it."""

    def __init__(self, headers: list[tuple[str, str]], peer: tuple[str, int] = PROXY) -> None:
        self.headers, self.peer = headers, peer
        self.said: tuple[object, ...] = ()

    def has_any(self, names: frozenset[str]) -> bool:
        return any(name.lower() in names for name, _ in self.headers)

    def apply_claim(self, client: object, secure: object = None, host: object = None, prefix: str = "") -> None:
        self.said = (client, secure, host, prefix)


def said(*headers: str, mode: str = AUTO, peer: tuple[str, int] = PROXY) -> tuple[object, ...]:
    asked = Asked([(name, value) for name, _, value in (header.partition(": ") for header in headers)], peer)
    Proxies(TRUSTED, mode).apply(asked)
    return asked.said


@pytest.mark.parametrize(
    ("hops", "client"),
    [
        (["198.51.100.7"], "198.51.100.7"),
        (["6.6.6.6", "198.51.100.7"], "198.51.100.7"),
        (["6.6.6.6", "198.51.100.7", "10.1.1.1"], "198.51.100.7"),
        (["198.51.100.7", "10.1.1.1", "fd00::1", "::1"], "198.51.100.7"),
        (["10.9.9.9", "10.1.1.1"], "10.9.9.9"),
        (["6.6.6.6", "unknown", "10.1.1.1"], "10.1.1.1"),
        (["6.6.6.6", "_hidden"], None),
        (["6.6.6.6", ""], None),
        (["6.6.6.6", "10.1.1.1.1"], None),
        ([], None),
        (["198.51.100.7:80"], "198.51.100.7"),
        (["[2001:db8::7]:80"], "2001:db8::7"),
        (["2001:db8::7"], "2001:db8::7"),
        (["::ffff:198.51.100.7"], "198.51.100.7"),
        (["[::ffff:10.1.1.1]"], "10.1.1.1"),
        (["fe80::1%eth0"], None),
        (["198.51.100.7:99999"], None),
        (["[198.51.100.7"], None),
    ],
)
def test_addresses_are_walked_from_the_right(hops: list[str], client: str | None) -> None:
    found = find_client(hops, TRUSTED.has)[0]
    assert (found and found[0]) == client


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (["X-Forwarded-For: 6.6.6.6, 198.51.100.7"], (("198.51.100.7", 0), None, None, "")),
        (["X-Forwarded-For: 6.6.6.6", "X-Forwarded-For: 198.51.100.7"], (("198.51.100.7", 0), None, None, "")),
        (["X-Forwarded-Proto: https"], (None, True, None, "")),
        (
            ["X-Forwarded-For: 6.6.6.6, 198.51.100.7, 10.1.1.1", "X-Forwarded-Proto: http, https, http"],
            (("198.51.100.7", 0), True, None, ""),
        ),
        (
            ["X-Forwarded-For: 6.6.6.6, 198.51.100.7", "X-Forwarded-Proto: https, https, http"],
            (("198.51.100.7", 0), False, None, ""),
        ),
        (
            ["x-forwarded-host: shop.example", "X-Forwarded-Port: 8443", "X-Forwarded-Prefix: /iot/"],
            (None, None, "shop.example:8443", "/iot"),
        ),
        (["X-Forwarded-Host: shop.example", "X-Forwarded-Port: 443"], (None, None, "shop.example", "")),
        (["X-Forwarded-Host: shop.example:444", "X-Forwarded-Port: 443"], (None, None, "shop.example:444", "")),
        (
            ['Forwarded: for=6.6.6.6, for="[2001:db8::7]:4711";proto=https;host="shop.example:8443"'],
            (("2001:db8::7", 4711), True, "shop.example:8443", ""),
        ),
        (["Forwarded: for=6.6.6.6", "forwarded: For=198.51.100.7;By=_x"], (("198.51.100.7", 0), None, None, "")),
        (["Forwarded: for=unknown;proto=https"], (None, True, None, "")),
        (['Forwarded: for="198.51\\.100.7"'], (("198.51.100.7", 0), None, None, "")),
    ],
)
def test_what_trusted_proxies_say(headers: list[str], expected: tuple[object, ...]) -> None:
    assert said(*headers) == expected
    assert said(*headers, peer=STRANGER) == (), "nobody else is believed"
    assert said("Host: localhost") == ()


@pytest.mark.parametrize(
    "header",
    [
        "X-Forwarded-Proto: gopher",
        "X-Forwarded-Prefix: /../etc",
        "X-Forwarded-Prefix: //evil.example",
        "X-Forwarded-Prefix: iot",
        "X-Forwarded-Prefix: /" + "x" * 300,
        "Forwarded: for",
        "Forwarded: for=a;for=b",
        'Forwarded: for="',
        'Forwarded: for="a, for="[::1]"',
        "Forwarded: for=a b",
        "Forwarded: ",
        "Forwarded: for=1.2.3.4,",
        "Forwarded: proto=ftp",
    ],
)
def test_what_is_malformed_is_refused(header: str) -> None:
    with pytest.raises(BadRequest):
        said(header)
    assert said(header, peer=STRANGER) == ()


def test_both_families_must_agree() -> None:
    both = ("X-Forwarded-For: 198.51.100.7", "X-Forwarded-Proto: https")
    assert said(*both, "Forwarded: for=198.51.100.7;host=evil.example") == (("198.51.100.7", 0), None, None, "")
    with pytest.raises(BadRequest, match="proxy.headers"):
        said(*both, "Forwarded: for=6.6.6.6")
    with pytest.raises(BadRequest, match="proxy.headers"):
        said(*both, "Forwarded: for=198.51.100.7;proto=http")
    assert said(*both, "Forwarded: for=6.6.6.6", mode=X_FORWARDED)[0] == ("198.51.100.7", 0)
    assert said(*both, "Forwarded: for=6.6.6.6", mode=FORWARDED)[0] == ("6.6.6.6", 0)
    assert said(*both, mode=FORWARDED) == (None, None, None, "")


def test_long_lists_and_nonsense_take_no_time() -> None:
    longest = ", ".join(["10.1.1.1"] * 1000)
    begin = process_time()
    assert said(f"X-Forwarded-For: 6.6.6.6, {longest}")[0] == ("6.6.6.6", 0)
    assert said("Forwarded: " + ",".join(["for=10.1.1.1"] * 1000))[0] == ("10.1.1.1", 0)
    for hostile in ('for="' + "\\" * 8000, "for=" + '"a' * 4000, " " * 8000, ";" * 8000, "a" * 8000 + "=", "[" * 8000):
        with pytest.raises(BadRequest):
            of_forwarded([hostile], TRUSTED.has)
        assert node(hostile) is None
    assert process_time() - begin < 0.5
    random_ = random.Random(7)
    for _ in range(5000):
        text = "".join(random_.choices('for=";,\\[]:._ 10aA%', k=random_.randrange(40)))
        try:
            of_forwarded([text], TRUSTED.has)
        except BadRequest:
            pass


@pytest.mark.parametrize("entry", ["10.0.0.1/8", "example.com", "300.1.1.1"])
def test_networks_that_are_none(entry: str) -> None:
    with pytest.raises(ValueError, match="."):
        TrustedNetworks([entry])


def test_networks() -> None:
    assert TRUSTED.has("::ffff:10.2.3.4")
    assert TRUSTED.has("::1%lo")
    assert not TRUSTED.has("11.0.0.1")
    assert not TRUSTED.has("")
    assert not TrustedNetworks()
    for number in range(5000):
        TRUSTED.has(f"11.0.{number >> 8}.{number & 255}")
    assert len(TRUSTED._cache) <= 4096
