"""Child processes: how they begin, what they are told, and that nothing of them is left."""

from __future__ import annotations

import os
import signal
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import gevent
import pytest

from smqrt.child_processes import processes
from smqrt.child_processes.processes import Pty, PtyCommand, ShellChild, inheritable_descriptors
from smqrt.errors import ArgumentError, StreamError
from smqrt.loop import greenlets
from tests.support.waiting import wait_until


def opened() -> set[tuple[str, str]]:
    """The pipes and terminals that this process has open, with their descriptors."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the list itself
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return {(name, what) for name, what in found if what.startswith(("pipe:", "/dev/pt"))}


@pytest.fixture(autouse=True)
def loop_knows_children() -> None:
    """What gevent opens for the first child is there."""
    gevent.get_hub().loop.install_sigchld()


@pytest.fixture
def run() -> Iterator[Callable[..., ShellChild]]:
    """`run(command, mode)` starts a shell command, which ends with the test; no descriptor is left."""
    before, made = opened(), list[ShellChild]()

    def start(command: bytes, mode: str = "", inherited: list[int] | None = None) -> ShellChild:
        made.append(ShellChild(command, mode, inherited or []))
        return made[-1]

    yield start
    for child in made:
        child.close()
        child.wait()
    assert opened() <= before


@pytest.fixture
def open_pty() -> Iterator[Callable[..., Pty]]:
    """`open_pty(word, ..., **options of PtyCommand)` starts a child on a terminal, which ends with the test."""
    before, made = opened(), list[Pty]()

    def start(*words: str, **options: Any) -> Pty:
        made.append(Pty(PtyCommand(words, **options)))
        return made[-1]

    yield start
    for pty in made:
        pty.close()
        wait_until(lambda pty=pty: pty.status is not None)
    assert opened() <= before


def everything(child: ShellChild) -> bytes:
    parts = []
    while data := child.read():
        parts.append(data)
    return b"".join(parts)


def word_of(call: Callable[[], object]) -> str:
    with pytest.raises(StreamError) as error:
        call()
    return error.value.word


# shell commands


def test_a_status_is_of_the_shell_or_signal(run: Callable[..., ShellChild]) -> None:
    ended, killed = run(b"exit 3"), run(b"kill -9 $$")
    assert (ended.wait(), killed.wait()) == (3, -9)
    assert ended.wait() == 3


def test_output_is_read_to_its_end(run: Callable[..., ShellChild]) -> None:
    child = run(b"echo one; sleep 0; echo two", "r")
    assert everything(child) == b"one\ntwo\n"
    assert child.read() == b""
    child.close_pipe()
    child.close_pipe()
    assert word_of(child.read) == "closed"


def test_a_command_does_not_read_the_servers_input(run: Callable[..., ShellChild]) -> None:
    own, (reading, writing) = os.dup(0), os.pipe()
    os.write(writing, b"of the server\n")
    os.dup2(reading, 0)
    try:
        assert everything(run(b"cat", "r")) == b""
    finally:
        os.dup2(own, 0)
        for fd in (own, reading, writing):
            os.close(fd)


def test_a_command_is_no_option_of_the_shell(run: Callable[..., ShellChild]) -> None:
    assert run(b"-no-such-command").wait() == 127


def test_input_is_written_whole(run: Callable[..., ShellChild], tmp_path: Path) -> None:
    child = run(b"cat > " + os.fsencode(tmp_path / "out"), "w")
    data = bytes(range(256)) * 4000
    child.write(data)
    child.close_pipe()
    assert child.wait() == 0
    assert (tmp_path / "out").read_bytes() == data
    assert word_of(lambda: child.write_now(b"x")) == "closed"


def test_a_write_without_waiting_leaves_what_has_no_room(run: Callable[..., ShellChild]) -> None:
    child = run(b"exec sleep 100", "w")
    data = b"x" * 1_000_000
    written = child.write_now(data)
    assert 0 < written < len(data)
    assert child.write_now(data) == 0
    blocked = gevent.spawn(child.write, data)
    gevent.sleep(0)
    child.close_pipe()
    with pytest.raises(StreamError):
        blocked.get(timeout=5)


def test_close_ends_the_group_with_the_shell(run: Callable[..., ShellChild], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "TERMINATE_S", 0.02)
    polite, stubborn = (
        run(b"(trap '' TERM; exec sleep 100) & wait"),
        run(b"trap '' TERM; echo ready; while :; do sleep 1; done", "r"),
    )
    assert stubborn.read() == b"ready\n"
    for child in (polite, stubborn):
        child.close()
        child.close()
    assert (polite.wait(), stubborn.wait()) == (-signal.SIGTERM, -signal.SIGKILL)
    for child in (polite, stubborn):
        wait_until(lambda child=child: not group_is_alive(child.pid))


def group_is_alive(group: int) -> bool:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            return True
    return False


def test_a_command_gets_no_descriptor_and_its_own_limit(run: Callable[..., ShellChild]) -> None:
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    try:
        found = inheritable_descriptors()
        assert writing in found
        assert reading not in found
        child = run(b"ls /proc/self/fd; ulimit -S -n; ps -o pgid= -p $$", "r", found)
        *numbers, files, group = everything(child).split()
    finally:
        os.close(reading)
        os.close(writing)
    assert b"%d" % writing not in numbers
    assert int(files) <= 1024
    assert int(group) == child.pid, "the leader of a group of its own"


# pseudo terminals


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        (["a\0b"], {}, "a NUL character"),
        (["cat"], {"environment": {"A": "\0"}}, "a NUL character"),
        (["cat"], {"environment": {"": "x"}}, "the name of a variable is empty"),
        (["cat"], {"environment": {"a=b": "x"}}, "has a '='"),
        (["cat"], {"stty": ["blue"]}, "unknown stty word 'blue'; possible are brkint"),
    ],
)
def test_a_wrong_command_is_named_and_starts_nothing(words: list[str], options: Any, message: str) -> None:
    before = opened()
    with pytest.raises(ArgumentError, match=message):
        Pty(PtyCommand(words, **options))
    assert opened() <= before


def test_a_program_is_looked_for_in_the_childs_path(tmp_path: Path) -> None:
    (tmp_path / "tool").touch()
    for word, path, reason in (
        ("sh", str(tmp_path), "notfound"),
        ("no such command", os.environ["PATH"], "notfound"),
        (str(tmp_path / "tool"), "", "noaccess"),
    ):
        assert word_of(lambda word=word, path=path: Pty(PtyCommand([word], environment={"PATH": path}))) == reason  # type: ignore[misc]


def test_variables_are_added_changed_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.setenv("GONE", "1")
    monkeypatch.delenv("TERM", raising=False)
    found = PtyCommand(["x"], environment={"GONE": None, "NEW": "2"}).variables()
    assert ("GONE" in found, found["KEPT"], found["NEW"], found["TERM"]) == (False, "1", "2", "xterm")


def test_a_terminal_is_raw_or_as_asked_for() -> None:
    def flags(stty: list[str] | None) -> tuple[bool, bool]:
        pty = Pty(PtyCommand(["sleep", "100"], stty=stty))
        name = Path(f"/proc/{pty.pid}/fd/0").resolve()
        with name.open("rb", buffering=0) as terminal:
            mode = termios.tcgetattr(terminal)
        pty.close()
        wait_until(lambda: pty.status is not None)
        return bool(mode[3] & termios.ECHO), bool(mode[1] & termios.OPOST)

    assert flags(None) == (False, False)
    assert flags([]) == (True, True)
    assert flags(["-echo", "sane"]) == (False, True)
    assert flags(["raw", "opost"]) == (False, True)


def test_the_older_stream_is_read_first(open_pty: Callable[..., Pty]) -> None:
    pty = open_pty("sh", "-c", "echo err >&2; read a; echo out; read b; echo more >&2", separate_stderr=True)
    for arrivals in range(2):
        wait_until(lambda arrivals=arrivals: pty.arrivals > arrivals)
        pty.write(b"\n")
    wait_until(lambda: pty.ended)
    assert [greenlets.wait(pty.read(5)) for _ in range(2)] == [(b"err\nmore\n", True), (b"out\n", False)]
    assert (pty.unread, pty.end_reported) == (True, False)
    assert greenlets.wait(pty.read(5)) is None
    assert (pty.unread, pty.end_reported) == (False, True)


def test_a_read_ends_at_its_timeout_or_the_close(open_pty: Callable[..., Pty]) -> None:
    pty = open_pty("sleep", "100")
    assert greenlets.wait(pty.read(0.001)) is False
    waiting = pty.read()
    pty.close()
    pty.close()
    assert greenlets.wait(waiting) is None
    for call in (pty.window_size, lambda: pty.write(b"x"), lambda: pty.set_window_size(1, 1)):
        assert word_of(call) == "terminated"


def test_a_window_has_a_size_in_bounds(open_pty: Callable[..., Pty]) -> None:
    pty = open_pty("sleep", "100")
    assert pty.window_size() == (processes.ROWS, processes.COLUMNS)
    pty.set_window_size(65_535, 1)
    assert pty.window_size() == (65_535, 1)
    for rows, columns in ((0, 1), (1, 65_536)):
        with pytest.raises(ArgumentError, match="rows and columns must be 1 to 65,535"):
            pty.set_window_size(rows, columns)


def test_a_status_of_a_signal_is_over_128(open_pty: Callable[..., Pty]) -> None:
    ended, killed = open_pty("sh", "-c", "exit 3"), open_pty("sleep", "100")
    wait_until(lambda: ended.status == 3)
    assert killed.terminate() == 128 + signal.SIGTERM
    assert killed.terminate() == 128 + signal.SIGTERM


def test_waiting_for_the_end_discards_much_output(open_pty: Callable[..., Pty]) -> None:
    pty = open_pty(sys.executable, "-ISc", "print('x' * 1000000)")
    assert pty.close_and_wait() == 0
