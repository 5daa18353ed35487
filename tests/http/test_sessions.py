"""Sessions, with a clock of the test's own."""

from __future__ import annotations

import pytest

from smqrt.http import sessions as module
from smqrt.http.sessions import SESSIONS_PER_ADDRESS, HttpSession, HttpSessions, cookie_field
from tests.support.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ended() -> list[HttpSession]:
    return []


@pytest.fixture
def sessions(clock, ended) -> HttpSessions:
    return HttpSessions(clock, ended.append)


def test_a_session_is_found_by_id_and_number(sessions):
    one, two = sessions.create("::1"), sessions.create("127.0.0.1")
    assert len(one.id) == 24
    assert one.id != two.id
    assert sessions.find(one.id) is one
    assert sessions.by_number(two.number) is two
    assert sessions.find("x" * 24) is None
    assert sessions.numbers() == [one.number, two.number]
    assert (one.uses, two.uses) == (1, 0)


def test_it_ends_when_unused_for_too_long(sessions, clock, ended):
    used, unused, held = sessions.create("a"), sessions.create("a"), sessions.create("a")
    held.locks = 1
    clock.now_s += module.MAX_INACTIVE_S - 1
    sessions.find(used.id)
    clock.now_s += 2
    sessions.expire()
    assert ended == [unused]
    assert sessions.find(unused.id) is None
    held.locks = 0
    assert sessions.find(held.id) is None
    assert ended == [unused, held]
    assert sessions.find(used.id) is used


def test_terminate_ends_it_once(sessions, ended):
    session = sessions.create("a")
    assert sessions.terminate(session) is True
    assert sessions.terminate(session) is False
    assert ended == [session]
    assert len(sessions) == 0


def test_the_least_recently_used_makes_room(clock, ended):
    sessions = HttpSessions(clock, ended.append, max_sessions=3)
    first, second, _ = (sessions.create("a") for _ in range(3))
    sessions.find(first.id)
    sessions.create("a")
    assert ended == [second]


def test_the_cookie_is_closed_to_scripts(sessions):
    session = sessions.create("a")
    assert cookie_field(session, False) == f"smqrt_session={session.id}; Path=/; HttpOnly; SameSite=Lax"
    assert cookie_field(session, True).endswith("; Secure")


def test_an_address_drives_out_only_its_own(clock, ended):
    sessions = HttpSessions(clock, ended.append, per_address=3)
    other = sessions.create("b")
    first, second, third = (sessions.create("a") for _ in range(3))
    sessions.find(first.id)
    sessions.create("a")
    assert ended == [second]
    sessions.create("a")
    assert ended == [second, third]
    assert SESSIONS_PER_ADDRESS.count == 2
    assert sessions.find(other.id) is other


def test_what_ended_makes_room(clock, ended):
    sessions = HttpSessions(clock, ended.append, per_address=2)
    one, two = sessions.create("a"), sessions.create("a")
    sessions.terminate(one)
    sessions.create("a")
    assert ended == [one]
    assert sessions.find(two.id) is two


def test_others_have_their_turn_while_many_end(clock, ended):
    sessions, breaths = HttpSessions(clock, ended.append), []
    kept = [sessions.create("a") for _ in range(100)][-1]
    clock.now_s += module.MAX_INACTIVE_S + 1

    def use_one() -> None:
        breaths.append(1)
        kept.accessed_s = clock.now_s

    sessions.expire(use_one)
    assert len(breaths) == 99
    assert sessions.by_number(kept.number) is kept
