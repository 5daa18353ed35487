"""The old process of a hot restart: what it accepts from a new one, and when it continues to serve."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gevent
import gevent.socket
import pytest

from smqrt.broker.mqtt.messages import Message as MqttMessage
from smqrt.server.restart import old_process as module
from smqrt.server.restart.control_socket import STEP_S, VERSION
from smqrt.server.restart.old_process import RESTORED_PER_S, HandOver, Restarts, restore_time_s
from smqrt.settings.server_settings import RestartSettings
from smqrt.smq.hub_registry import HubRegistry
from smqrt.workers.worker_rpc import ChannelError, FdChannel, Message
from tests.broker.mqtt.hub import MqttHub
from tests.support.waiting import let_others_run, wait_until

HELLO: Message = {"do": "hello", "version": VERSION, "pid": 4321}
READY: Message = {"do": "ready", "hubs": []}


class Old:
    """The server of the old process.

    Attributes:
        did: what a restart has done with its pipelines.
    """

    is_successor = False

    def __init__(self) -> None:
        self.did: list[str] = []
        self.idle: list[tuple[Any, tuple[str, int], bytes]] = []
        self.http: Any = SimpleNamespace(release_idle=self._release_idle, draining=False)

    def _release_idle(self) -> list[tuple[Any, tuple[str, int], bytes]]:
        self.http.draining = True
        return self.idle

    def failed_applications(self) -> list[str]:
        return ["broken: it fails"]

    def stop_pipelines(self) -> None:
        self.did.append("stopped")

    def start_pipelines(self) -> None:
        self.did.append("started")


class Case:
    """A server without hubs, and what a new process says to it.

    Attributes:
        lines: what was reported; done: the process that serves now.
        heard: what the new process got.
    """

    def __init__(self) -> None:
        self.server = Old()
        self.lines: list[str] = []
        self.done: list[int] = []
        self.restarts = Restarts(self.server, RestartSettings(load_s=5.0), self.lines.append, self.done.append)
        self.heard: list[str] = []
        self.channels: list[FdChannel] = []

    def pair(self) -> tuple[FdChannel, FdChannel]:
        """Both ends of a channel, that of the old process first."""
        made = tuple(map(FdChannel, socket.socketpair(socket.AF_UNIX)))
        self.channels += made
        return made  # type: ignore[return-value]

    def hand_over(self, *says: Message) -> str | None:
        """The fault when the new process says this and no more; it hears everything first."""
        old, new = self.pair()
        for message in says:
            new.send(message)
        hearing = gevent.spawn(self.hear, new)
        fault, _ = self.restarts.hand_over(old)
        if fault is None:
            let_others_run(10)
        else:
            hearing.join(5)
            assert hearing.dead, "the channel is closed"
        hearing.kill()
        return fault

    last: Message

    def hear(self, channel: FdChannel) -> None:
        while True:
            try:
                message, fds = channel.receive(None)
            except ChannelError:
                return
            for fd in fds:
                os.close(fd)
            self.heard.append(message["do"])
            self.last = message


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    monkeypatch.setattr(module, "hub_registry", HubRegistry())  # without the hubs of other tests
    monkeypatch.setattr(module, "open_listeners", [])
    monkeypatch.setattr(module, "open_acceptors", [])
    monkeypatch.setattr(module, "open_meshes", [])
    found = Case()
    yield found
    found.restarts.finish()
    for channel in found.channels:
        channel.close()


def test_the_new_process_serves_after_all_steps(case: Case) -> None:
    assert case.hand_over(HELLO, READY, {"do": "serving"}) is None
    assert case.restarts.is_handed_over
    assert case.done == [4321]
    assert case.server.did == ["stopped"]
    assert case.heard == ["welcome", "done", "left"]
    assert "restart: process 4321 serves, with 0 clients of this one (at most 0 ms" in case.lines[0]


def test_the_welcome_names_failed_applications(case: Case) -> None:
    case.hand_over(HELLO, {"do": "failed", "why": "enough"})
    assert case.heard == ["welcome"]
    assert case.last["failed"] == ["broken: it fails"]
    assert (case.last["pid"], case.last["version"]) == (os.getpid(), VERSION)


VERSION_FAULT = f"the new process uses version 2 of the hand-over, this one {VERSION}"
EARLY = {
    "another version": ([{**HELLO, "version": 2}], VERSION_FAULT),
    "no pid": ([{**HELLO, "pid": None}], "the hello of the new process has no pid"),
    "pid 0": ([{**HELLO, "pid": 0}], "the hello of the new process has no pid"),
    "pid true": ([{**HELLO, "pid": True}], "the hello of the new process has no pid"),
    "no hello": ([READY], "the other process sent 'ready' instead of 'hello'"),
    "no hubs": ([HELLO, {"do": "ready"}], "the ready message of the new process has no list of hubs"),
    "failed": ([HELLO, {"do": "failed", "why": "an application fails"}], "an application fails"),
}


@pytest.mark.parametrize("says", EARLY)
def test_a_wrong_beginning_changes_nothing(case: Case, says: str) -> None:
    packets, fault = EARLY[says]
    assert case.hand_over(*packets) == fault
    assert case.server.did == []
    assert case.lines == [f"restart: failed, this process continues: {fault}"]
    assert not case.restarts.is_handed_over
    assert case.done == []


def test_a_late_failure_is_rolled_back(case: Case) -> None:
    assert case.hand_over(HELLO, READY, {"do": "failed", "why": "too late"}) == "too late"
    assert case.server.did == ["stopped", "started"]
    assert case.server.http.draining is False
    assert case.heard == ["welcome", "done", "abort"]
    assert case.last["why"] == "too late"
    assert case.hand_over(HELLO, READY, {"do": "serving"}) is None, "another one may follow"


def test_idle_connections_are_sent_and_closed_here(case: Case) -> None:
    here, there = socket.socketpair()
    case.server.idle = [(here, ("192.0.2.1", 5), b"GET")]
    case.hand_over(HELLO, READY, {"do": "serving"})
    assert case.heard == ["welcome", "http", "done", "left"]
    assert here.fileno() == -1
    there.close()


def test_one_restart_at_a_time_and_none_after(case: Case) -> None:
    waiting, _ = case.pair()
    first = gevent.spawn(case.restarts.hand_over, waiting)
    gevent.sleep(0)
    assert case.hand_over(HELLO) == "another restart is under way"
    assert case.heard == ["abort"]
    waiting.close()
    first.join(5)
    assert case.hand_over(HELLO, READY, {"do": "serving"}) is None
    assert case.hand_over(HELLO, READY, {"do": "serving"}) == "another restart is under way"


def test_process_1_of_a_container_is_not_replaced(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "getpid", lambda: 1)
    path = str(tmp_path / "socket")
    restarts = Restarts(case.server, RestartSettings(socket=path), case.lines.append, case.done.append)
    restarts.open()
    with gevent.socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        channel = FdChannel(sock)
        channel.send({"do": "restart"})
        answer, _ = channel.receive(5)
    restarts.close()
    why = "process 1 of a container can't be replaced; start a new container, with --take-over if it shares"
    assert answer == {"do": "failed", "why": f"{why} restart.socket"}
    assert case.lines == [f"restart: {why} restart.socket"]


def test_a_command_that_cannot_be_started_is_reported(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.current_process, "COMMAND", ["/no/such/program"])
    case.restarts.ask()
    wait_until(lambda: case.lines)
    assert case.lines[0].startswith("restart: a new process can't be started: ")


def test_a_new_process_that_reads_nothing_is_killed(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(module.os, "kill", lambda *given: killed.append(given))
    old, _ = case.pair()
    with pytest.raises(ChannelError):
        old.send({"do": "filling", "data": bytes(4 << 20)}, timeout_s=0.01)
    send = old.send
    monkeypatch.setattr(old, "send", lambda message, timeout_s: send(message, timeout_s=0.01))
    attempt = HandOver(case.server, old, 1.0)
    attempt.abort("the test")
    assert killed == [(os.getpid(), signal.SIGKILL)], "before its hello, the process at the other end"
    HandOver(case.server, case.pair()[0], 1.0).abort("the test")
    assert len(killed) == 1, "one that reads is not"


def test_a_stopping_server_cancels_the_restart(case: Case) -> None:
    old, new = case.pair()
    running = gevent.spawn(case.restarts.hand_over, old)
    gevent.sleep(0)
    case.restarts.close()
    fault, _ = running.get(timeout=5)
    assert fault is not None
    message, _ = new.receive(5)
    assert message == {"do": "abort", "why": "the server is being stopped"}


def test_the_new_process_has_more_time_for_more_sessions() -> None:
    hub = MqttHub()
    assert restore_time_s(hub.broker) == STEP_S  # type: ignore[arg-type]
    for at in range(100):
        hub.client(f"d{at}")
        hub.devices.retain(MqttMessage(b"t/%d" % at, b"x", 0, True))
    assert restore_time_s(hub.broker) == STEP_S + 200 / RESTORED_PER_S  # type: ignore[arg-type]
