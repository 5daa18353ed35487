"""The filter tree of mqttbroker, without sockets."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paho.mqtt.client import topic_matches_sub

from smqrt.apps.lua import api
from smqrt.apps.lua.vm import Services, Vm

TREE = """
local tree = require "mqttbroker.tree".new()
function add(filter, client) tree:add(filter, client, true) end
function remove(filter, client) tree:remove(filter, client) end
function match(topic)
  local names = {}
  for _, set in ipairs(tree:match(topic)) do
    for client in pairs(set) do names[client] = true end
  end
  local list = {}
  for name in pairs(names) do list[#list + 1] = name end
  return table.concat(list, "\\0")
end
function is_empty() return next(tree.exact) == nil and next(tree.root.children) == nil end
"""

levels = st.sampled_from(["a", "b", "", "$x", "ä"])
names = st.lists(levels, min_size=1, max_size=4).map("/".join).filter(bool)
parts = st.lists(st.one_of(levels, st.just("+")), min_size=1, max_size=4)
filters = st.builds(lambda some, end: "/".join(some + end), parts, st.sampled_from([[], ["#"]])).filter(bool) | st.just(
    "#"
)


@pytest.fixture(scope="module")
def machine() -> Vm:
    vm = Vm()
    api.install(vm, Services())
    return vm


def matches(vm: Vm, topic: str) -> set[bytes]:
    """The clients that a message would go to."""
    (found,) = vm.eval("return match(...)", "=t", topic.encode())
    return set(found.split(b"\0")) if found else set()


@settings(max_examples=100)
@given(st.lists(filters, max_size=8, unique=True), st.lists(names, min_size=1, max_size=6), st.data())
def test_tree_matches_as_paho_does(machine: Vm, wanted: list[str], topics: list[str], data: st.DataObject) -> None:
    machine.eval(TREE)
    for one in wanted:
        machine.eval("add(...)", "=t", one.encode(), one.encode())
    for topic in topics:
        expected = {one.encode() for one in wanted if topic_matches_sub(one, topic)}
        assert matches(machine, topic) == expected, topic
    for one in data.draw(st.permutations(wanted)):
        machine.eval("remove(...)", "=t", one.encode(), one.encode())
    assert machine.eval("return is_empty()") == (True,)


@pytest.mark.parametrize(
    ("topic_filter", "accepted"),
    [
        ("a", True),
        ("/", True),
        ("#", True),
        ("+", True),
        ("a/+/b/#", True),
        ("+/+", True),
        ("$SYS/#", True),
        (" ", True),
        ("", False),
        ("a#", False),
        ("#/a", False),
        ("a/#/b", False),
        ("##", False),
        ("a+", False),
        ("+a", False),
        ("a/b+/c", False),
        ("/" * 127, True),
        ("/" * 128, False),
    ],
)
def test_filters(machine: Vm, topic_filter: str, accepted: bool) -> None:
    found = machine.eval("return require 'mqttbroker.topics'.is_filter(...)", "=t", topic_filter.encode())
    assert found == (accepted,)


def test_a_topic_with_very_many_levels_costs_little(machine: Vm) -> None:
    machine.eval(TREE)
    machine.eval("add('+/+/#', 'a')")
    assert matches(machine, "/" * 65000) == {b"a"}


def test_second_subscription_to_a_filter_replaces_the_first(machine: Vm) -> None:
    machine.eval(TREE + "add('a/+', 'x') add('a/+', 'x') remove('a/+', 'x') remove('a/+', 'x')")
    assert matches(machine, "a/b") == set()
