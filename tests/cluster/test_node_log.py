"""Log lines about nodes that join and leave."""

from __future__ import annotations

import logging

import pytest

from smqrt.cluster.engines.mesh import Mesh
from tests.cluster.cut import Cable
from tests.cluster.engines import KEY
from tests.support.waiting import wait_until


def test_joins_losses_returns_and_leaves_of_nodes_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "smqrt")

    def levels(words: str) -> list[int]:
        return [one.levelno for one in caplog.records if words in one.message and one.message.startswith("node ")]

    one, other = Mesh(KEY, 1), Mesh(KEY, 2)
    cable = Cable(other.listen("127.0.0.1", 0).address[1])
    try:
        one.dial("127.0.0.1", cable.port)
        wait_until(lambda: one.node.links and other.node.links, "they are linked")
        assert levels("node 2 at") == levels("node 1 at") == [logging.INFO]
        cable.cut()
        wait_until(lambda: levels("node 2 at") and levels(" is lost: ") == [logging.WARNING] * 2)
        cable.mend()
        wait_until(lambda: one.node.links and other.node.links, "they are linked again")
        wait_until(lambda: one.node._lost == other.node._lost == {})
        other.close()
        wait_until(lambda: levels(" has left: ") == [logging.INFO])
        assert len(levels(" is lost: ")) == 2
    finally:
        cable.close()
        one.close()
        other.close()
