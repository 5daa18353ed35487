"""Every client plays the same cases against a hub, and the manual shows which ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.client_cases import _WORDS, PAGE, Driver, Entry, Hubs, Player, cases, entries, needs, page


@pytest.fixture(scope="module")
def hubs() -> Iterator[Hubs]:
    server = Hubs()
    yield server
    server.close()


@pytest.fixture(scope="module")
def drivers() -> Iterator[dict[str, Driver]]:
    """By the name of the client: one process for all of its cases."""
    started: dict[str, Driver] = {}
    yield started
    for driver in started.values():
        driver.close()


def running(drivers: dict[str, Driver], entry: Entry) -> Driver:
    """The driver of a client, which is started for its first case."""
    if entry.name not in drivers:
        drivers[entry.name] = Driver(entry)
    return drivers[entry.name]


def supported() -> list[object]:
    """Each client with each case that it can play."""
    return [
        pytest.param(
            entry,
            case,
            id=f"{entry.name}-{case['name']}",
            marks=[pytest.mark.servers] if entry.name == "MicroPython" else [],  # where scripts/test installs it
        )
        for entry in entries()
        for case in cases()
        if not entry.missing(case)
    ]


@pytest.mark.parametrize(("entry", "case"), supported())
def test_case(entry: Entry, case: dict[str, object], hubs: Hubs, drivers: dict[str, Driver]) -> None:
    Player(case, running(drivers, entry), hubs).play()


def test_the_page_shows_the_cases() -> None:
    assert PAGE.read_text("utf-8") == page(), "scripts/fix makes it anew"


def test_names_of_cases_and_needs() -> None:
    names = [case["name"] for case in cases()]
    assert len(set(names)) == len(names)
    assert all(case["clients"] == len(letters(case)) for case in cases())
    lacks = {word for entry in entries() for word in entry.lacks}
    assert lacks <= set(needs()) <= set(_WORDS), "each need has a word on the page, and nothing is lacking for no case"


def letters(case: dict[str, object]) -> set[str]:
    steps = case["steps"]
    assert isinstance(steps, list)
    return {step["client"] for step in steps if "client" in step}


def test_a_failing_step_is_named(hubs: Hubs, drivers: dict[str, Driver]) -> None:
    steps = [
        {"client": "a", "do": "connect"},
        {"hub": "publish", "etid": "$A", "text": "x"},
        {"client": "a", "expect": "message", "text": "y"},
    ]
    entry = entries()[0]
    driver = running(drivers, entry)
    with pytest.raises(AssertionError, match="wrong, step 3"):
        Player({"name": "wrong", "clients": 1, "steps": steps}, driver, hubs).play()
    with pytest.raises(AssertionError, match="more messages"):
        Player(
            {"name": "wrong", "clients": 1, "steps": [*steps[:2], steps[1], {**steps[2], "text": "x"}]}, driver, hubs
        ).play()
