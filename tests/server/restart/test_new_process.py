"""The new process of a hot restart: what it accepts from the old one, and when it gives up."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gevent
import pytest

from smqrt.errors import StartError
from smqrt.server.restart import new_process as module
from smqrt.server.restart.control_socket import ENVIRONMENT, VERSION
from smqrt.server.restart.new_process import TakeOver
from smqrt.smq.hub_registry import HubRegistry
from smqrt.workers.worker_rpc import FdChannel, Message
from tests.support.waiting import wait_until

WELCOME: Message = {
    "do": "welcome",
    "pid": 4321,
    "listeners": [],
    "hubs": {},
    "nodes": [],
    "failed": ["broken: it fails"],
}


class Old:
    """The other end: the old process.

    Attributes:
        registry: the hubs of the new process.
        inherited: the ports that it has got, with the descriptors.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.registry = HubRegistry()
        self.inherited: dict[tuple[str, int], list[int]] = {}
        monkeypatch.setattr(module, "hub_registry", self.registry)
        kept = SimpleNamespace(add=self.inherited.__setitem__, close=lambda: None)
        monkeypatch.setattr(module, "inherited", kept)
        ours, theirs = socket.socketpair(socket.AF_UNIX)
        self.channel, self.new = FdChannel(ours), FdChannel(theirs)

    def take_over(self, welcome: Message = WELCOME, fds: list[int] | None = None) -> TakeOver:
        self.channel.send(welcome, fds or [])
        return TakeOver(self.new)

    def hears(self) -> Message:
        message, _ = self.channel.receive(5)
        return message

    def close(self) -> None:
        for fds in self.inherited.values():
            for fd in fds:
                os.close(fd)
        self.channel.close()
        self.new.close()


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> Iterator[Old]:
    found = Old(monkeypatch)
    yield found
    found.close()


HTTP: Any = None


def test_the_first_messages_tell_who_both_are(old: Old) -> None:
    nodes = [[b"n" * 16, 7]]
    found = old.take_over({**WELCOME, "hubs": {"/main": {}}, "nodes": nodes})
    assert old.hears() == {"do": "hello", "version": VERSION, "pid": os.getpid()}
    assert found.pid == 4321
    assert old.registry.names_for("/main") == {}
    assert old.registry.predecessors == {(b"n" * 16, 7)}
    assert old.registry.is_waiting
    assert not old.registry.has_left


def test_listening_sockets_belong_to_their_ports(old: Old) -> None:
    given = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
    old.take_over({**WELCOME, "listeners": [["", 80, 2], ["::1", 443, 1]]}, given)
    assert {port: len(fds) for port, fds in old.inherited.items()} == {("", 80): 2, ("::1", 443): 1}
    for fd in given:
        os.close(fd)


BAD: dict[str, dict[str, Any]] = {
    "no pid": {"pid": None},
    "pid 0": {"pid": 0},
    "hubs that are a list": {"hubs": []},
    "a listener without sockets": {"listeners": [["", 80, 0], ["", 81, 1]]},
    "more sockets than listeners": {"listeners": []},
    "more listeners than sockets": {"listeners": [["", 80, 2]]},
    "a port that is no number": {"listeners": [["", "http", 1]]},
    "nodes without epochs": {"listeners": [["", 80, 1]], "nodes": [[b"x"]]},
}


@pytest.mark.parametrize("what", BAD)
def test_an_invalid_welcome_is_refused(old: Old, what: str) -> None:
    reading, writing = os.pipe()
    with pytest.raises(StartError, match="Cannot replace the other process: invalid welcome message: "):
        old.take_over({**WELCOME, "listeners": [["", 80, 1]], **BAD[what]}, [writing])
    os.close(writing)
    assert os.read(reading, 1) == b"", "its descriptors are closed"
    os.close(reading)
    assert old.hears()["do"] == "hello"
    assert old.hears() == {"do": "failed", "why": "invalid welcome message"}
    assert not old.registry.is_waiting
    assert old.inherited == {}


def test_a_refusal_is_passed_on(old: Old) -> None:
    with pytest.raises(StartError, match="Cannot replace the other process: another restart is under way."):
        old.take_over({"do": "abort", "why": "another restart is under way"})


def test_a_process_of_another_user_is_refused(old: Old, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FdChannel, "is_of_this_user", lambda self: False)
    with pytest.raises(StartError, match="it belongs to another user"):
        old.take_over()


def test_no_server_at_the_socket_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="No server answers at .*; start one without --take-over"):
        TakeOver.of(str(tmp_path / "no.sock"))
    with pytest.raises(StartError, match="the limit of a Unix socket"):
        TakeOver.of("/" + "x" * 200)


def test_without_its_variable_a_process_replaces_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert TakeOver.inherited() is None


def test_an_application_that_failed_before_may_fail_again(old: Old) -> None:
    takes = old.take_over()
    old.hears()
    old.channel.send({"do": "done"})
    takes.take(HTTP, ["broken: in another way"])
    assert old.hears() == {"do": "ready", "hubs": [], "relays": True, "succeeds": True, "mqtt": True, "unpacks": True}
    assert old.hears() == {"do": "serving"}
    assert not old.registry.is_waiting


def test_an_application_that_newly_fails_ends_the_restart(old: Old) -> None:
    takes = old.take_over()
    old.hears()
    with pytest.raises(StartError, match="The other process continues: application chat: no"):
        takes.take(HTTP, ["broken: as before", "chat: no"])
    assert old.hears() == {"do": "failed", "why": "application chat: no"}


def test_an_abort_ends_the_new_process(old: Old) -> None:
    takes = old.take_over()
    old.channel.send({"do": "abort", "why": "the server is being stopped"})
    with pytest.raises(StartError, match="The other process continues: the server is being stopped."):
        takes.take(HTTP, [])


def test_the_old_process_dies_and_this_one_serves(old: Old, caplog: pytest.LogCaptureFixture) -> None:
    takes = old.take_over()
    old.channel.close()
    takes.take(HTTP, [])
    assert "this process continues with 0 clients" in caplog.text
    assert not old.registry.is_waiting


def test_a_hub_that_was_closed_meanwhile_ends_the_restart(old: Old) -> None:
    takes = old.take_over()
    reading, writing = os.pipe()
    old.channel.send({"do": "ahead", "key": "/gone", "clients": [[1, {}, ""]]}, [writing])
    os.close(writing)
    old.channel.send({"do": "hub", "key": "/gone"})
    with pytest.raises(StartError, match="the hub /gone was closed meanwhile"):
        takes.take(HTTP, [])
    assert os.read(reading, 1) == b"", "the connections of its clients are closed here"
    os.close(reading)
    assert [old.hears()["do"] for _ in range(3)] == ["hello", "ready", "failed"]


def test_clusters_are_joined_when_the_old_process_leaves(old: Old) -> None:
    takes = old.take_over()
    left: list[bool] = []
    old.registry.when_left(lambda: left.append(True))
    taking = gevent.spawn(takes.publish_late)
    old.channel.send({"do": "late", "key": "/gone", "frames": [[1, 2, b""]]})
    old.channel.send({"do": "left"})
    wait_until(lambda: left)
    old.channel.send({"do": "abort", "why": "a timeout"})
    assert taking.get(timeout=5) is False
    assert left == [True]


def test_the_death_of_the_old_process_is_leaving(old: Old) -> None:
    takes = old.take_over()
    left: list[bool] = []
    old.registry.when_left(lambda: left.append(True))
    old.channel.close()
    assert takes.publish_late()
    assert left == [True]
