"""Plays the conformance cases over every transport."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.apps.lua.hub_site import LuaHubSite
from tests.conformance.script import Case, Player, read
from tests.support.device import RAW, WS, Authority, Site, bounded, expect_clean

CASES = [case for path in sorted(Path(__file__).parent.glob("*.smq")) for case in read(path)]
IDS = {"news": 100, "other": 200, "sub": 300, "none": 0x7FFFFFFF, "server": 1}


TLS_EVERY = 12
"""Of the cases over TLS with a hub made in Lua, every twelfth is played: below the hub nothing differs."""


def _pairs() -> list[Any]:
    return [pytest.param(case, kind, id=f"{kind}: {case.name}") for case in CASES for kind in case.kinds]


def _pairs_in_lua() -> list[Any]:
    plain = [pair for pair in _pairs() if pair.values[1] in (RAW, WS)]
    return plain + [pair for pair in _pairs() if pair not in plain][::TLS_EVERY]


@pytest.fixture(scope="module")
def made_in_lua(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LuaHubSite]:
    """One hub for all cases."""
    names = 'smq:create("news", 100) smq:create("other", 200) smq:createsub("sub", 300)'
    site = LuaHubSite(tmp_path_factory.mktemp("conformance"), authority, names)
    yield site
    with bounded():
        site.close()


@pytest.mark.parametrize(("case", "kind"), _pairs())
def test_case(site: Site, case: Case, kind: str) -> None:
    site.smq.create("news", 100)
    site.smq.create("other", 200)
    site.smq.createsub("sub", 300)
    Player(lambda: site.open(kind), IDS).play(case)
    expect_clean(site)


@pytest.mark.parametrize(("case", "kind"), _pairs_in_lua())
def test_case_in_lua(made_in_lua: Any, case: Case, kind: str) -> None:
    """The hub is made by a `.preload`."""
    try:
        Player(lambda: made_in_lua.open(kind), IDS).play(case)
    finally:
        expect_clean(made_in_lua)


def test_the_player_notices() -> None:
    """The player itself fails where it should: wrong byte, shorter, longer."""
    for wrong in ("05 00", "05 00 00*4 6f", "05 00 00*4 6e 00"):
        with pytest.raises(AssertionError):
            Player(lambda: None, {})._compare(wrong, b"\x05\0\0\0\0\0n")  # type: ignore[arg-type, return-value]


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert any(RAW in case.kinds for case in CASES)
