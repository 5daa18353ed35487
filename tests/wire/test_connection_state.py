"""The life of a connection: legal moves, and what an illegal one leaves in the log."""

from __future__ import annotations

import itertools
import logging

import pytest

from smqrt.wire.connection_state import TRANSITIONS, Life, transition


@pytest.fixture
def legal_moves() -> None:
    """Here the others are made on purpose."""


@pytest.mark.parametrize(("life", "to"), list(itertools.product(Life, Life)))
def test_moves(life: Life, to: Life, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "smqrt.life"):
        assert transition(life, to) is to
    assert [record.getMessage() for record in caplog.records] == (
        [] if to in TRANSITIONS[life] else [f"illegal transition of a connection from {life.value} to {to.value}"]
    )


def test_connection_states_never_move_back() -> None:
    order = [Life.OPENING, Life.OPEN, Life.DRAINING, Life.CLOSED]
    for life, later in itertools.combinations(order, 2):
        assert later in life.transitions
        assert life not in later.transitions
    assert [life for life in Life if life.over] == [Life.DRAINING, Life.CLOSED]
    for life in Life:
        assert (Life.CLOSED in life.transitions) is (life is not Life.CLOSED)
