"""Plays the conformance cases over every transport."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conformance.script import Case, Player, read
from tests.device import RAW, Site, expect_clean

CASES = [case for path in sorted(Path(__file__).parent.glob("*.smq")) for case in read(path)]
IDS = {"news": 100, "other": 200, "sub": 300, "none": 0x7FFFFFFF, "server": 1}


def _pairs() -> list[Any]:
    return [pytest.param(case, kind, id=f"{kind}: {case.name}") for case in CASES for kind in case.kinds]


@pytest.mark.parametrize(("case", "kind"), _pairs())
def test_case(site: Site, case: Case, kind: str) -> None:
    site.smq.create("news", 100)
    site.smq.create("other", 200)
    site.smq.createsub("sub", 300)
    Player(lambda: site.open(kind), IDS).play(case)
    expect_clean(site)


def test_the_player_notices() -> None:
    """The player itself fails where it should: wrong byte, shorter, longer."""
    for wrong in ("05 00", "05 00 00*4 6f", "05 00 00*4 6e 00"):
        with pytest.raises(AssertionError):
            Player(lambda: None, {})._compare(wrong, b"\x05\0\0\0\0\0n")  # type: ignore[arg-type, return-value]


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert any(RAW in case.kinds for case in CASES)
