"""The supervisor of workers, with workers that are no processes: how they start, end, and replace one another."""

from __future__ import annotations

import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gevent
import pytest
from gevent.event import Event

from smqrt.errors import StartError
from smqrt.process.current_process import RestartDelays
from smqrt.server import supervisor as module
from smqrt.server.supervisor import MAX_DIRECTORY_CHARS, MAX_FAILED_STARTS, Supervisor, worker_settings
from smqrt.settings.server_settings import AdminSettings, ListenerSettings, Settings
from smqrt.workers.worker_rpc import FdChannel, Message, WorkerPlace
from tests.support.waiting import let_others_run, wait_until

COUNT = 3


class Worker:
    """What the supervisor takes for a worker.

    Attributes:
        sent, signals: what the supervisor has sent it; covered: the workers whose connections it accepts.
        outcome: of the hand-over to another process.
        others: see `WorkerProcess`.
    """

    lines = ("listening",)

    def __init__(
        self,
        place: WorkerPlace,
        ports: dict[str, Any],
        balance: Any,
        on_message: Callable[..., object],
        take_over: int | None,
    ) -> None:
        self.place, self.name, self.pid, self.take_over = place, place.label, 1000 + place.number, take_over
        self.ports, self._on_message = set(ports), on_message
        self.settled, self.ended, self.reloaded = Event(), Event(), Event()
        self.is_ready = self.accepts = self.is_unresponsive = False
        self.began_s = self.heard_s = 0.0
        self.fault: str | None = None
        self.exit_text, self.exit_code = "ended", 0
        self.sent: list[str] = []
        self.signals: list[int] = []
        self.covered: list[int] = []
        self.outcome: tuple[str | None, int] = (None, 7)

    def says(self, kind: str, **more: object) -> None:
        self._on_message(self, {"do": kind, **more})

    def serves(self) -> None:
        self.is_ready = self.accepts = True
        self.settled.set()
        self.says("ready")

    def ends(self, code: int = 0) -> None:
        self.exit_code, self.accepts = code, False
        for event in (self.settled, self.reloaded, self.ended):
            event.set()

    def send(self, message: Message, fds: list[int] | None = None) -> None:
        self.sent.append(message["do"])
        if message["do"] == "reload":
            self.reloaded.set()

    def cover(self, workers: list[int]) -> None:
        self.covered = workers

    def stop(self) -> None:
        self.sent.append("stop")
        self.ends(self.exit_code)

    def signal(self, number: int) -> None:
        self.signals.append(number)

    def await_hand_over(self, timeout_s: float) -> tuple[str | None, int]:
        gevent.sleep(0)
        if self.outcome[0] is None:
            self.accepts = False
        return self.outcome


class Server:
    """A supervisor in this process.

    Attributes:
        made: the workers, in the order in which they were started.
        lines: what it has reported.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, count: int = COUNT) -> None:
        self.made: list[Worker] = []
        self.lines: list[str] = []
        monkeypatch.setattr(module, "WorkerProcess", self._make)
        monkeypatch.setattr(module, "Signals", self._signals)
        monkeypatch.setattr(module, "RESTART_DELAYS", RestartDelays(first_s=0.0, longest_s=0.0, steady_s=1e9))
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        self.path = str(tmp_path / "r.sock")
        settings = Settings(port=0, admin=AdminSettings(port=0))
        settings = replace(settings, restart=replace(settings.restart, socket=self.path))
        self.supervisor = Supervisor(settings, count, None, self.lines.append, lambda: None)
        self.fails: OSError | None = None
        self._running: Any = None

    def _make(self, *given: Any) -> Worker:
        if self.fails is not None:
            raise self.fails
        self.made.append(Worker(*given))
        return self.made[-1]

    def _signals(self, at_once: dict[int, Any], when_ready: dict[int, Any]) -> Any:
        self.reactions = {**at_once, **when_ready}
        return self

    def ready(self) -> None:
        """See `Signals`."""

    def begin(self) -> Server:
        self._running = gevent.spawn(self.supervisor.run)
        wait_until(lambda: self.made)
        return self

    def serve(self) -> Server:
        """All workers serve."""
        self.begin().made[0].serves()
        wait_until(lambda: len(self.made) == self.supervisor.count)
        for worker in self.made[1:]:
            worker.serves()
        wait_until(lambda: f"{self.supervisor.count} workers: processes 1000, 1001, 1002" in self.lines)
        return self

    def ends(self) -> int:
        """The exit code of the server, which has to end."""
        return int(self._running.get(timeout=10))

    def restart(self) -> Message:
        """What `smqrt restart` is answered."""
        return self.ask({"do": "restart"})

    def ask(self, message: Message) -> Message:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(self.path)
        channel = FdChannel(sock)
        channel.send(message)
        answer, _ = channel.receive(10)
        channel.close()
        return answer

    def close(self) -> None:
        self.supervisor.stopping.set()
        if self._running is None:
            self.begin()
        self._running.join(10)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    found = Server(monkeypatch, tmp_path)
    yield found
    found.close()


# ---- limits of the whole server


def test_limits_of_the_server_are_divided_and_rounded_up() -> None:
    settings = Settings(max_connections=10, listener={"more": ListenerSettings(port=1, max_connections=4)})
    settings = replace(settings, limits=replace(settings.limits, connect_rate=10.0, connections_per_user=None))
    found = worker_settings(settings, WorkerPlace(1, 4))
    assert (found.max_connections, found.listener["more"].max_connections) == (3, 1)
    assert (found.limits.connect_rate, found.limits.connections_per_user) == (2.5, None)
    assert found.limits.observes == settings.limits.observes
    assert worker_settings(settings, WorkerPlace()) is settings


# ---- start and end


def test_the_first_worker_serves_before_others_start(server: Server) -> None:
    server.begin()
    let_others_run(20)
    (first,) = server.made
    first.serves()
    wait_until(lambda: len(server.made) == COUNT)
    assert [worker.place.number for worker in server.made] == [0, 1, 2]
    assert [module.ADMIN in worker.ports for worker in server.made] == [True, False, False]


def test_a_worker_failing_at_start_ends_the_server(server: Server) -> None:
    server.begin().made[0].fault = "The application fails."
    server.made[0].ends(1)
    with pytest.raises(StartError, match="The application fails"):
        server.ends()


def test_a_worker_that_never_serves_ends_the_server(server: Server) -> None:
    server.begin()
    for count in range(MAX_FAILED_STARTS):
        wait_until(lambda count=count: len(server.made) == count + 1)
        server.made[-1].ends(1)
    with pytest.raises(StartError, match="Worker w0 failed 5 times before it served; it ended"):
        server.ends()
    assert len(server.made) == MAX_FAILED_STARTS


def test_a_worker_that_cannot_be_started_ends_the_server(server: Server) -> None:
    server.fails = OSError(11, "No more processes")
    server.supervisor.report = server.lines.append
    running = gevent.spawn(server.supervisor.run)
    with pytest.raises(StartError, match="A worker can't be started: No more processes"):
        running.get(timeout=10)
    server._running = running


def test_a_dead_worker_is_replaced_under_its_number(server: Server) -> None:
    server.serve().made[1].ends(-9)
    wait_until(lambda: len(server.made) == COUNT + 1)
    assert (server.made[-1].place.number, server.made[-1].place.start) == (1, 1)
    server.made[-1].serves()
    assert server.lines[-1] == "w1: process 1001 serves"


def test_an_application_ends_the_server_with_its_code(server: Server) -> None:
    server.serve().made[1].says("exit", code=5)
    assert server.ends() == 5
    assert all("stop" in worker.sent for worker in server.made)


def test_a_worker_failing_at_the_end_is_an_error(server: Server) -> None:
    server.serve().made[1].exit_code = 3
    server.supervisor.stopping.set()
    assert server.ends() == 1


def test_workers_that_do_not_stop_are_killed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KILL_AFTER_S", 0.02)
    settings = server.supervisor.settings
    server.supervisor.settings = replace(settings, drain=replace(settings.drain, timeout_s=0.001))
    stubborn = server.serve().made[1]
    monkeypatch.setattr(stubborn, "stop", lambda: None)
    server.supervisor.stopping.set()
    assert server.ends() == 1
    assert stubborn.signals == [signal.SIGKILL]


def test_lines_of_the_start_are_reported_once(server: Server) -> None:
    first = server.begin().made[0]
    first.says("report", line="deprecated")
    first.serves()
    wait_until(lambda: len(server.made) == COUNT)
    second = server.made[1]
    second.says("report", line="deprecated")
    second.says("report", line="of the second")
    second.serves()
    second.says("report", line="deprecated")
    assert server.lines == ["deprecated", "w1: of the second", "w1: deprecated"]


def test_the_folder_of_workers_is_short_and_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * MAX_DIRECTORY_CHARS)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    server = Server(monkeypatch, tmp_path).begin()
    directory = server.made[0].place.directory
    assert directory is not None
    assert directory.is_dir()
    assert len(str(directory)) <= MAX_DIRECTORY_CHARS
    server.close()
    assert not directory.exists()
    assert list(long.iterdir()) == []


# ---- connections of workers that accept none


def test_the_next_worker_accepts_for_one_that_does_not(server: Server) -> None:
    first, second, third = server.serve().made
    for silent, covered in ((second, [[], None, [1]]), (third, [[1, 2], None, None])):
        silent.accepts = False
        silent.says("left")
        for worker, numbers in zip(server.made, covered, strict=True):
            assert numbers is None or worker.covered == numbers
    third.accepts = True
    third.says("ready")
    assert (first.covered, third.covered) == ([], [1])


def test_reload_and_signals_reach_all_workers(server: Server) -> None:
    server.serve()
    server.reactions[signal.SIGHUP]()
    wait_until(lambda: all("reload" in worker.sent for worker in server.made))
    server.reactions[signal.SIGUSR1]()
    assert all(worker.signals == [signal.SIGUSR1] for worker in server.made)


# ---- hot restart


def serve_new(server: Server) -> None:
    """New processes serve as soon as they have taken over."""
    while True:
        gevent.sleep(0)
        for worker in server.made[COUNT:]:
            if not worker.is_ready and worker is server.supervisor.workers[worker.place.number]:
                worker.serves()


def test_a_restart_replaces_one_worker_after_another(server: Server) -> None:
    old = list(server.serve().made)
    new = gevent.spawn(serve_new, server)
    answer = server.restart()
    new.kill()
    assert (answer["do"], answer["clients"], answer["workers"]) == ("done", 7 * COUNT, COUNT)
    assert [worker.place.number for worker in server.made[COUNT:]] == [0, 1, 2]
    assert all(worker.sent[-1] == "hand_over" for worker in old)
    assert all(worker.take_over is not None for worker in server.made[COUNT:])
    assert server.lines[-1] == "restart: 3 new workers serve, with 21 clients"
    for worker in old:  # they exit when their clients are gone
        worker.ends()
    let_others_run(10)
    assert len(server.made) == 2 * COUNT


@pytest.mark.parametrize(
    ("fault", "why"), [(None, "it reads slowly"), ("The application fails.", "The application fails.")]
)
def test_a_restart_stops_at_the_first_failure(server: Server, fault: str | None, why: str) -> None:
    server.serve().made[1].outcome = ("it reads slowly", 0)
    made = server.supervisor.start

    def start(number: int, take_over: int | None = None) -> Any:
        worker = made(number, take_over)
        worker.fault = fault if number else None  # type: ignore[assignment]
        return worker

    server.supervisor.start = start  # type: ignore[method-assign]
    new = gevent.spawn(serve_new, server)
    answer = server.restart()
    new.kill()
    assert answer == {"do": "failed", "why": f"w1: {why}"}
    assert server.made[-1].signals == [signal.SIGKILL]
    assert server.supervisor.workers[1] is server.made[1]
    assert server.supervisor.workers[0] is not server.made[0], "that one serves already"
    assert server.lines[-1] == f"restart: stopped, the other workers continue: w1: {why}"


def test_a_worker_that_does_not_serve_is_not_restarted(server: Server) -> None:
    server.serve().made[0].accepts = False
    assert server.restart() == {"do": "failed", "why": "w0: the worker is not serving; try again"}


def test_a_new_process_that_cannot_be_started_fails(server: Server) -> None:
    server.serve().fails = OSError(11, "No more processes")
    assert server.restart()["why"] == "w0: a new process can't be started: No more processes"
    server.fails = None


def test_a_second_restart_at_once_is_refused(server: Server) -> None:
    server.serve().made[0].outcome = ("it takes long", 0)
    first, second = gevent.spawn(server.restart), gevent.spawn(server.restart)
    assert {first.get(timeout=10)["why"], second.get(timeout=10)["why"]} == {
        "w0: it takes long",
        "another restart is under way",
    }
    assert server.lines[-2:] == [
        "restart: another restart is under way",
        "restart: stopped, the other workers continue: w0: it takes long",
    ]


def test_only_the_command_restarts_workers(server: Server) -> None:
    answer = server.serve().ask({"do": "hello"})
    assert answer == {"do": "abort", "why": "a server with workers is restarted by `smqrt restart`"}
