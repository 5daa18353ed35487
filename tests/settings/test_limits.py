"""The register of limits: counts, one line a second, names and settings."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from smqrt.settings import limits
from smqrt.settings.limits import Limit


@pytest.fixture
def limit() -> Iterator[Limit]:
    yield Limit("of_a_test", "limits.of_a_test", "two are enough")
    del limits._register["of_a_test"]


def test_one_line_a_second_and_all_are_counted(
    limit: Limit, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(limits, "monotonic", lambda: now_s)
    with caplog.at_level(logging.WARNING, "smqrt"):
        for _ in range(5):
            limit.refused("a third")
        now_s += limits.LINE_EVERY_S
        limit.refused("a sixth", "3 are there", times=2)
    sentence = "refused: a third: two are enough; see the setting limits.of_a_test"
    later = "refused: a sixth: 3 are there; see the setting limits.of_a_test (4 more since the last such line)"
    assert caplog.messages == [sentence, later]
    state = limit.state()
    assert (state.count, state.last, state.last_s > 0) == (7, "a sixth", True)


def test_the_register_has_all_by_name(limit: Limit) -> None:
    names = [state.name for state in limits.snapshot()]
    assert names == sorted(names)
    assert "of_a_test" in names
    with pytest.raises(AssertionError, match="duplicate"):
        Limit("of_a_test", "", "another")
