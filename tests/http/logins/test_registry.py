"""Logins of users, and the single-use values that clients hash with their passwords."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from smqrt.auth.identity import Identity, Method
from smqrt.http.headers import Headers
from smqrt.http.logins import registry
from smqrt.http.logins.registry import Login, Logins, Nonces, Seeds, State
from smqrt.http.sessions import HttpSession
from tests.support.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def logins() -> Iterator[Logins]:
    logins = Logins()
    yield logins
    logins.sessions.close()


class Asked:
    """A request, as logins see it."""

    def __init__(self, peer: str = "192.0.2.1", before: Any = None) -> None:
        self.env: dict[str, Any] = {}
        self.peer, self.secure = (peer, 1000), False
        self.response: Any = SimpleNamespace(headers=Headers())
        self.cookie = None if before is None else before.response.headers.get("set-cookie").partition(";")[0]

    def get(self, name: str) -> str | None:
        return self.cookie if name == "cookie" else None


def test_a_nonce_and_its_counts(clock: Clock):
    nonces = Nonces(clock)
    nonce = nonces.issue()
    assert nonces.state(nonce, 1) is State.VALID
    assert nonces.use(nonce, 5)
    assert nonces.use(nonce, 3), "requests overtake each other"
    assert [nonces.use(nonce, count) for count in (5, 3)] == [False, False]
    assert nonces.state(nonce, 3) is State.STALE
    assert nonces.use(nonce, 10_000)
    assert nonces.state(nonce, 4) is State.STALE, "too far behind to tell"
    clock.now_s += registry.NONCE_LIFETIME_S + 1
    assert nonces.state(nonce, 10_001) is State.STALE


def test_forged_nonces(clock: Clock):
    nonces = Nonces(clock)
    nonce = nonces.issue()
    for forged in ("", "x", nonce[:-4] + "AAA=", nonce + "=", nonce + "A", Nonces(clock).issue(), "ä" * 44, "A" * 5000):
        assert nonces.state(forged, 1) is State.STALE, forged
        assert not nonces.use(forged, 1), forged


def test_a_nonce_that_was_logged_out_with(clock: Clock):
    nonces = Nonces(clock)
    nonce = nonces.issue()
    nonces.use(nonce, 1)
    nonces.end(nonce)
    assert nonces.state(nonce, 2) is State.ENDED
    assert not nonces.use(nonce, 2)


def test_evicted_nonces_are_not_valid_again(clock: Clock, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry, "_MAX_KEPT", 3)
    nonces = Nonces(clock)
    issued = []
    for _ in range(5):
        clock.now_s += 1
        issued.append(nonces.issue())
    assert all(nonces.use(nonce, 1) for nonce in issued)
    assert [nonces.state(nonce, 1) for nonce in issued] == [State.STALE] * 5
    assert [nonces.use(nonce, 2) for nonce in issued] == [False] * 2 + [True] * 3


def test_a_seed_is_good_for_one_login(clock: Clock):
    seeds = Seeds(clock)
    seed, key = seeds.issue()
    assert -(1 << 31) <= int(seed) < 1 << 31
    assert seeds.is_valid(seed, key)
    assert not seeds.is_valid(str(int(seed) + 1), key)
    assert not seeds.is_valid(seed, key[:-1] + ("A" if key[-1] != "A" else "B"))
    assert not Seeds(clock).is_valid(seed, key), "of another server"
    assert [seeds.use(seed, key) for _ in range(2)] == [True, False]
    assert not seeds.is_valid(seed, key)
    late, its_key = seeds.issue()
    clock.now_s += registry.SEED_LIFETIME_S + 1
    assert not seeds.is_valid(late, its_key)


def test_a_full_user_is_refused_or_loses_the_oldest(logins: Logins) -> None:
    first, second = (logins.begin(Asked(), "ann", maxusers=2) for _ in range(2))
    assert first is not None
    assert logins.begin(Asked(), "ann", maxusers=2, recycle=False) is None
    third = logins.begin(Asked(), "ann", maxusers=2)
    assert third is not None
    assert second is not None
    assert logins.sessions_of("ann") == [second.session, third.session]
    assert first.session.login is None


def test_another_users_session_ends_its_own_goes_on(logins: Logins) -> None:
    first = Asked()
    login = logins.begin(first, "ann")
    assert login is not None
    login.session["basket"] = "apples"
    again = Asked(before=first)
    repeated = logins.begin(again, "ann")
    assert repeated is not None
    assert repeated.session["basket"] == "apples"
    assert logins.of(Asked(before=first)) is None, "the id of before"
    other = logins.begin(Asked(before=again), "bob")
    assert other is not None
    assert "basket" not in other.session
    assert logins.users() == ["bob"]


def test_a_cookie_of_another_address_has_no_login(logins: Logins) -> None:
    here = Asked()
    login = logins.begin(here, "ann")
    assert logins.of(Asked(before=here)) is login
    assert logins.of(Asked("192.0.2.2", before=here)) is None


def test_basic_without_cookies_continues_one_login(logins: Logins) -> None:
    first = logins.begin(Asked(), "ann", "secret", "basic", maxusers=9)
    assert first is not None
    assert logins.begin(Asked(), "ann", "secret", "basic", maxusers=9) is first
    assert logins.begin(Asked("192.0.2.2"), "ann", "secret", "basic", maxusers=9) is not first
    assert logins.begin(Asked(), "ann", "secret", "digest", maxusers=9) is not first


def test_a_logout_everywhere_spares_nameless_logins(logins: Logins) -> None:
    nameless, others = Asked(), Asked()
    logins.begin(nameless, None)
    kept = logins.begin(others, None)
    assert logins.end(nameless, everywhere=True)
    assert logins.of(nameless) is None
    assert logins.of(others) is kept
    here = Asked()
    for request in (Asked(), here):
        logins.begin(request, "ann", maxusers=2)
    assert logins.users() == ["ann"]
    assert logins.end(here, everywhere=True)
    assert logins.users() == []
    assert not logins.end(here)


def test_a_changed_users_file_ends_only_its_invalid_logins(logins: Logins) -> None:
    for name in ("ann", "bob"):
        logins.begin(Asked(), name, identity=Identity(name))
    logins.begin(Asked(), "eve")
    logins.recheck_clients(lambda identity: None if identity.user == "ann" else "removed")
    assert logins.users() == ["ann", "eve"]


def test_a_login_goes_to_another_worker_and_back() -> None:
    session = HttpSession("id", 1, "192.0.2.1", 0, 0)
    identity = Identity("ann", ("staff",), Method.PASSWORD, expires_s=1.5, proof="hash")
    for one in (identity, None):
        login = Login("ann", "secret", "form", "192.0.2.1", session, identity=one)
        record = json.loads(json.dumps(login.record()))
        copied = Login.of_record(record, session)
        assert copied.record() == login.record()
        assert (copied.identity is None) == (one is None)
        if copied.identity is not None:
            assert (copied.identity.groups, copied.identity.method) == (("staff",), Method.PASSWORD)


def test_a_nonce_used_at_another_worker_is_used(clock: Clock) -> None:
    here, there = Nonces(clock, b"key"), Nonces(clock, b"key")
    there.used.on_use = here.used.arrived
    nonce = here.issue()
    assert there.use(nonce, 7)
    assert not here.use(nonce, 7)
    assert here.use(nonce, 8)
    there.end(nonce)
    assert here.state(nonce, 9) is State.ENDED


def test_nothing_is_used_without_the_other_workers(clock: Clock) -> None:
    nonces, seeds = (kind(clock, b"key", lambda: nullcontext(False)) for kind in (Nonces, Seeds))
    nonce, (seed, key) = nonces.issue(), seeds.issue()
    assert not nonces.use(nonce, 1)
    assert not seeds.use(seed, key)
    assert seeds.is_valid(seed, key)
