"""Each fault once; more of them by hand (`tests.cluster.faults`)."""

from __future__ import annotations

import pytest

from tests.cluster.faults import FAULTS, run

pytestmark = pytest.mark.servers


def test_healthy_nodes_deliver_everything_once_and_in_order() -> None:
    said: list[str] = []
    run(list(FAULTS), 1, 150, say=said.append)
    assert len(said) == len(FAULTS) + 1
