"""Keys of hubs, by which the next process finds them again, and the order of a hot restart."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

from smqrt.errors import ArgumentError, SmqrtError
from smqrt.process.current_process import AppScope, running_app
from smqrt.smq.hub_registry import HubRegistry


class Hub:
    """What the registry takes for a hub."""

    def __init__(self, key: str, fails: bool = False) -> None:
        self.key, self.fails, self.opened = key, fails, 0

    def open_files(self) -> None:
        if self.fails:
            raise SmqrtError("the disk is full")
        self.opened += 1


@pytest.fixture
def registry() -> HubRegistry:
    return HubRegistry()


@pytest.fixture
def made(registry: HubRegistry) -> Callable[..., Any]:
    """Makes a hub that is registered."""
    kept: list[Hub] = []

    def make(name: str | None = None, fails: bool = False) -> Hub:
        kept.append(Hub(registry.key_of(name), fails))
        registry.add(kept[-1])  # type: ignore[arg-type]
        return kept[-1]

    return make


def test_hubs_without_a_name_are_numbered(made: Callable[..., Hub]) -> None:
    assert [made().key for _ in range(2)] == ["-/1", "-/2"]
    assert made("main").key == "-/main"


def test_a_number_that_is_a_name_is_left_out(made: Callable[..., Hub]) -> None:
    made("1")
    assert made().key == "-/2"


def test_each_application_has_keys_of_its_own(made: Callable[..., Hub]) -> None:
    made("main")
    for name, internal, expected in (("chat", False, "chat/main"), ("chat", True, "chat!/main")):
        app = AppScope(None, name)
        app.is_internal = internal
        with running_app(app):
            assert made("main").key == expected
            assert made().key == expected.replace("main", "1")
            with pytest.raises(ArgumentError, match="'main' is the name of another hub of this application"):
                made("main")


def test_a_failed_creation_frees_its_number(registry: HubRegistry) -> None:
    with running_app(AppScope(None, "chat")):
        first = registry.key_of(None)
        registry.free_key(first)
        assert registry.key_of(None) == first
        registry.free_key(registry.key_of("named"))
        assert registry.key_of(None) == "chat/2"


def test_a_closed_hub_does_not_remove_a_newer_one(registry: HubRegistry, made: Callable[..., Hub]) -> None:
    old = made("main")
    registry.remove(old)  # type: ignore[arg-type]
    new = made("main")
    registry.remove(old)  # type: ignore[arg-type]
    assert registry.find("-/main") is new
    assert list(registry.hubs()) == [new]


def test_unused_hubs_are_not_kept_alive(registry: HubRegistry) -> None:
    hub = Hub("-/main")
    registry.add(hub)  # type: ignore[arg-type]
    del hub
    gc.collect(0)
    assert registry.find("-/main") is None


# ---- in the new process of a hot restart


def test_only_hubs_the_old_process_lacks_open_their_files(
    registry: HubRegistry, made: Callable[..., Hub], caplog: pytest.LogCaptureFixture
) -> None:
    registry.expect({"-/old": {}}, [(b"n", 1)])
    assert registry.is_waiting
    old, broken, new = made("old"), made("broken", fails=True), made("new")
    assert registry.names_for("-/old") == {}
    assert registry.names_for("-/new") is None
    registry.end()
    assert (old.opened, new.opened) == (0, 1)
    assert caplog.messages == ["a hub continues without its file: the disk is full"]
    assert broken.opened == 0
    assert not registry.is_waiting
    assert registry.names_for("-/old") is None


def test_clusters_start_once_when_the_old_process_has_left(
    registry: HubRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []
    assert registry.has_left, "there is no old process"
    registry.expect({}, [(b"n", 1)])
    assert not registry.has_left
    assert registry.predecessors == {(b"n", 1)}
    registry.when_left(lambda: calls.append("first"))
    registry.when_left(lambda: 1 / 0)
    registry.when_left(lambda: calls.append("last"))
    for _ in range(2):
        registry.left()
    assert calls == ["first", "last"]
    assert len(caplog.records) == 1
    assert registry.has_left
