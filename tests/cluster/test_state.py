"""`Interest` beside a set of pairs, which is what it means."""

from __future__ import annotations

from itertools import chain

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from smqrt.cluster.state import Interest
from smqrt.wire.cluster_packets import Key

KEYS = st.tuples(st.integers(1, 3), st.integers(0, 2))  # so few that names clash
NODES = st.integers(0, 5).map(lambda number: 1 << number)


class Model(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.interest = Interest()
        self.wanted: set[tuple[Key, int]] = set()

    @rule(key=KEYS, node=NODES)
    def add(self, key: Key, node: int) -> None:
        assert self.interest.add(key, node) == ((key, node) not in self.wanted)
        self.wanted.add((key, node))

    @rule(key=KEYS, node=NODES)
    def discard(self, key: Key, node: int) -> None:
        assert self.interest.discard(key, node) == ((key, node) in self.wanted)
        self.wanted.discard((key, node))

    @rule(node=NODES)
    def forget_a_node(self, node: int) -> None:
        for keys in self.interest.keys(node):
            for key in keys:
                self.interest.discard(key, node)
        self.wanted = {one for one in self.wanted if one[1] != node}

    @invariant()
    def tells_who_wants_what(self) -> None:
        for number in range(1, 4):
            for check in range(3):
                wanted = sum(node for key, node in self.wanted if key == (number, check))
                assert self.interest.nodes((number, check)) == wanted
            assert bool(self.interest.nodes_of_number(number)) == any(key[0] == number for key, _ in self.wanted)
        assert len(self.interest) == len({key for key, _ in self.wanted})
        for node in (1, 2, 4):
            assert sorted(chain.from_iterable(self.interest.keys(node))) == sorted(
                key for key, one in self.wanted if one == node
            )


test_interest = Model.TestCase
test_interest.settings = settings(max_examples=40)
