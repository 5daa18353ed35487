"""The throttle of failed logins, with a clock that the test sets."""

from __future__ import annotations

import pytest

from smqrt.auth import throttle as module
from smqrt.auth.throttle import LOGINS, GuessLimit, Throttle, site_of
from tests.support.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_guesses_of_a_name_are_limited_then_slowly_restored(clock: Clock):
    throttle = Throttle(clock, GuessLimit(3, 10), GuessLimit(100, 1))
    assert [throttle.take("1.1.1.1", "ann") for _ in range(5)] == [True] * 3 + [False] * 2
    assert throttle.take("1.1.1.1", "bob"), "another name"
    assert throttle.take("2.2.2.2", "ann"), "another address"
    assert throttle.wait_s("1.1.1.1", "ann") == 10
    assert LOGINS.count == 2
    clock.now_s += 10
    assert [throttle.take("1.1.1.1", "ann") for _ in range(2)] == [True, False]
    clock.now_s += 1000
    assert [throttle.take("1.1.1.1", "ann") for _ in range(4)] == [True] * 3 + [False]


def test_an_address_has_so_many_for_all_names(clock: Clock):
    throttle = Throttle(clock, GuessLimit(3, 10), GuessLimit(5, 2))
    assert [throttle.take("1.1.1.1", f"name{at}") for at in range(7)] == [True] * 5 + [False] * 2
    assert throttle.wait_s("1.1.1.1", "other") == 2


def test_a_login_restores_all_guesses(clock: Clock):
    throttle = Throttle(clock, GuessLimit(3, 10), GuessLimit(5, 2))
    for _ in range(50):
        assert throttle.take("1.1.1.1", "ann")
        throttle.succeeded("1.1.1.1", "ann")
    throttle.take("1.1.1.1", "ann")
    throttle.failed("1.1.1.1", "ann")
    assert throttle.failures("1.1.1.1") == 1
    throttle.succeeded("1.1.1.1", "ann")
    assert throttle.failures("1.1.1.1") == 0


def test_known_names_do_not_limit_guesses_at_others(clock: Clock):
    """Behind one proxy there are those who work and one who guesses."""
    throttle = Throttle(clock, GuessLimit(3, 10), GuessLimit(5, 2))
    throttle.take("1.1.1.1", "ann")
    throttle.succeeded("1.1.1.1", "ann")
    while throttle.take("1.1.1.1", f"guess{clock.now_s}"):
        clock.now_s += 0.001
    assert throttle.take("1.1.1.1", "ann")
    assert not throttle.take("1.1.1.1", "bob")


def test_the_table_is_bounded(clock: Clock, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_MAX_ENTRIES", 10)
    throttle = Throttle(clock, GuessLimit(3, 10), GuessLimit(5, 2))
    for at in range(100):
        throttle.take(f"1.1.1.{at}", "ann")
        throttle.succeeded(f"1.1.2.{at}", "ann")
    assert len(throttle._counts) <= 10
    assert len(throttle._known) <= 10


def test_guess_limits_close_no_logged_in_client(clock: Clock, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_MAX_ENTRIES", 20)
    throttle = Throttle(clock, GuessLimit(3, 10), GuessLimit(5, 2))
    while throttle.take("1.1.1.1", "ann"):
        pass
    for at in range(100):
        throttle.take("2.2.2.2", f"name{at}")
        throttle.wait_s("2.2.2.2", f"name{at}")
    assert not throttle.take("1.1.1.1", "ann")


def test_long_names_take_no_room(clock: Clock):
    throttle = Throttle(clock, GuessLimit(3, 10), GuessLimit(5, 2))
    assert [throttle.take("1.1.1.1", "x" * 3000) for _ in range(4)] == [True] * 3 + [False]
    throttle.succeeded("1.1.1.1", "x" * 3000)
    assert throttle.take("1.1.1.1", "x" * 3000)
    assert all(len(name or "") <= 64 for _, name in [*throttle._counts, *throttle._known])


def test_an_ipv6_network_is_one_visitor():
    assert site_of("1.2.3.4") == "1.2.3.4"
    assert site_of("2001:db8:1:2::1") == site_of("2001:db8:1:2:ffff::") != site_of("2001:db8:1:3::1")
    assert site_of("::ffff:1.2.3.4") == "1.2.3.4"
    assert site_of("fe80::1%eth0") == site_of("fe80::2%eth1")
    assert site_of("no:address") == "no:address"
