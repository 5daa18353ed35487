"""Node events of applications: `onnode`, in Python and Lua."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gevent
import pytest

from smqrt import hub
from smqrt.broker.state import Hooks
from smqrt.cluster.engines.mesh import Mesh
from smqrt.smq.gevent_broker import GeventBroker, HubOptions
from tests.apps.lua.lua_hub import LuaSite
from tests.cluster.cut import Cable
from tests.cluster.engines import KEY, Engine
from tests.support.waiting import wait_until

Event = tuple[int, str, str]
LUA = """
  smq = require"smq.hub".create{onnode = function(node, event, why)
    if BLOCKS then ba.sleep(20) end
    record(node, event, why)
    error("on purpose in onnode")
  end}
"""


def test_a_node_joins_is_lost_is_back_and_leaves(engine: Engine) -> None:
    told: list[Event] = []
    hooks = Hooks(onnode=lambda *event: told.append(event))
    one, other = engine.place("one", hooks=hooks), engine.place("other")
    engine.joined(one, other)
    number = other.member.number
    subscriber = other.client()
    engine.until(lambda: told == [(number, "joined", "")], told)
    for rounds in range(1, 3):
        engine.cut(one, other)
        engine.until(lambda: not one.member.remotes and not other.member.remotes, "both notice")
        engine.until(lambda of=rounds: len(told) == 2 * of, told)
        assert told[-1][:2] == (number, "lost")
        assert told[-1][2]
        engine.heal(one, other)
        engine.joined(one, other)
        engine.until(lambda of=rounds: len(told) == 2 * of + 1, told)
        assert told[-1] == (number, "back", "")
        assert one.member.phantom(subscriber.etid), "its clients are known by then"
    engine.stop(other)
    engine.until(lambda: len(told) == 6, told)
    assert told[-1][:2] == (number, "left")


def test_a_leaving_node_gets_no_events(engine: Engine) -> None:
    told: list[str] = []
    one = engine.place("one", hooks=Hooks(onnode=lambda node, event, why: told.append(event)))
    other = engine.place("other", hooks=Hooks(onnode=lambda node, event, why: told.append(event)))
    engine.joined(one, other)
    engine.until(lambda: told == ["joined", "joined"], told)
    one.member.leave()
    engine.until(lambda: len(told) == 3, told)
    engine.settle()
    assert told[2:] == ["left"]


class Nodes:
    """A hub of an application, and another node that comes and goes.

    Args:
        broker: the application's.
    """

    def __init__(self, broker: GeventBroker) -> None:
        self.here, self.there = Mesh(KEY, 1), Mesh(KEY, 2)
        self.other = GeventBroker(Hooks(), HubOptions())
        self.here.join(broker, "hub")
        self.there.join(self.other, "hub")
        self.cable = Cable(self.there.listen("127.0.0.1", 0).address[1])
        self.here.dial("127.0.0.1", self.cable.port)

    def close(self) -> None:
        self.here.close()
        self.there.close()
        self.other.close()
        self.cable.close()


@pytest.fixture
def nodes() -> Iterator[Callable[[GeventBroker], Nodes]]:
    made: list[Nodes] = []

    def make(broker: GeventBroker) -> Nodes:
        made.append(Nodes(broker))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("blocks", [False, True])
def test_python(nodes: Callable[[GeventBroker], Nodes], caplog: pytest.LogCaptureFixture, blocks: bool) -> None:
    told: list[Event] = []

    def onnode(node: int, event: str, why: str) -> None:
        if blocks:
            gevent.sleep(0.02)
        told.append((node, event, why))
        raise ValueError("on purpose in onnode")

    with hub.create(onnode=onnode) as smq:
        _come_and_go(nodes(smq.broker), lambda: told)
    assert "on purpose in onnode" in caplog.text
    assert "error in onnode of the hub made at " in caplog.text


@pytest.mark.parametrize("blocks", ["false", "true"])
def test_lua(
    nodes: Callable[[GeventBroker], Nodes],
    lua: Callable[[str], LuaSite],
    caplog: pytest.LogCaptureFixture,
    blocks: str,
) -> None:
    site = lua(LUA.replace("BLOCKS", blocks))
    _come_and_go(nodes(site.broker), lambda: site.calls)
    assert "error in onnode of the hub made at " in caplog.text
    assert "on purpose in onnode" in caplog.text


def _come_and_go(both: Nodes, told: Callable[[], list[Any]]) -> None:
    wait_until(lambda: len(told()) == 1, "it joins")
    both.cable.cut()
    wait_until(lambda: len(told()) == 2, "it is lost")
    both.cable.mend()
    wait_until(lambda: len(told()) == 3, "it is back")
    both.there.close()
    wait_until(lambda: len(told()) == 4, "it leaves")
    text = [tuple(one.decode() if isinstance(one, bytes) else one for one in event) for event in told()]
    assert [event[:2] for event in text] == [(2, "joined"), (2, "lost"), (2, "back"), (2, "left")]
    assert [bool(event[2]) for event in text] == [False, True, False, True]
