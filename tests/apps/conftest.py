"""Fixtures of the Lua tests: a runtime, and the guard that no greenlet is switched while Lua is on the C stack."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gevent
import greenlet
import pytest

from smqrt.apps.lua import api
from smqrt.apps.lua import vm as vm_module
from smqrt.apps.lua.activities import Activities
from smqrt.apps.lua.vm import Services, Vm
from smqrt.wire import cluster_packets
from tests.apps.lua.app_server import AppServer
from tests.apps.lua.recorder import Recorder

# All of these tests run on another Lua, too: SMQRT_LUA__VERSION=5.5 pytest tests/apps
vm_module.VERSION = os.environ.get("SMQRT_LUA__VERSION", vm_module.VERSION)
# To make a key takes 50 ms of CPU, and the tests have few passwords.
cluster_packets.key_of = functools.cache(cluster_packets.key_of)

HALF = b"""
local core, py = ...
test = py
test.core = core
test.ref = core.ref
"""


_passes = itertools.count(1)


def _collect() -> None:
    """Collect what the test before has left, 1.5 MB of Lua: otherwise a pass comes when they are gigabytes, and takes
    long enough for the test to fail in which it comes.

    What lives on after a test is looked at again after three hundred: that takes half a second and more.
    """
    if next(_passes) % 300 == 0:
        gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def violations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Fails the test when a greenlet switch happens inside a call from Lua to Python: that corrupts lupa's state.

    Gives the list of the switches that were seen, for the test of this guard itself. What earlier tests left for the
    garbage collector, greenlets among it, is collected before.
    """
    _collect()
    runtimes: weakref.WeakSet[Activities] = weakref.WeakSet()
    violations: list[str] = []
    plain_init = Activities.__init__

    def init(self: Activities, *args: Any) -> None:
        plain_init(self, *args)
        runtimes.add(self)

    def on_switch(event: str, args: Any) -> None:
        if any(runtime.nested for runtime in runtimes):
            violations.append(f"{event} {args}")

    monkeypatch.setattr(Activities, "__init__", init)
    previous = greenlet.settrace(on_switch)
    yield violations
    greenlet.settrace(previous)
    assert not violations


@pytest.fixture
def services() -> Services:
    """What the API of `vm` shares."""
    return Services()


@pytest.fixture
def vm(services: Services) -> Iterator[Vm]:
    """A runtime with the API that needs no server."""
    machine = Vm()
    api.install(machine, services)
    yield machine
    machine.stop()
    gevent.sleep(0)


@pytest.fixture
def recorder(vm: Vm) -> Recorder:
    """`test.record`, `test.back` and `test.sleep` in Lua, and what was recorded."""
    half = Recorder(vm)
    vm.namespace("test", {"record": half.record, "back": half.back}, {"sleep": _sleep}, source=HALF)
    return half


def _sleep(seconds: float, *values: Any) -> tuple[Any, ...]:
    gevent.sleep(seconds)
    return values


@pytest.fixture
def server(tmp_path: Path) -> Iterator[AppServer]:
    """A server of applications, see `AppServer`."""
    running = AppServer(tmp_path)
    yield running
    running.close()
    gevent.sleep(0)
