"""What commands print, and how they end when they are interrupted."""

from __future__ import annotations

import os
import signal
import threading

import click
import gevent
import pytest
from click.testing import CliRunner

from smqrt.cli import terminal
from smqrt.cli.terminal import (
    InterruptibleCommand,
    counted,
    interrupt_this_greenlet,
    json_line,
    now,
    payload_fields,
    polled_progress,
    progress,
)


@pytest.mark.parametrize(
    ("payload", "shown"),
    [
        (b'{"a": 1}', {"payload": '{"a": 1}', "json": {"a": 1}}),
        (b"on", {"payload": "on"}),
        (b"\xff", {"payload_hex": "ff"}),
        (b"[" * 60000, {"payload": "[" * 60000}),
    ],
)
def test_a_payload_is_shown_as_it_came(payload: bytes, shown: dict[str, object]) -> None:
    assert payload_fields(payload) == shown


def test_a_json_line_controls_no_terminal() -> None:
    assert json_line({"a": "\x1b[2J\n", "ü": 1}) == '{"a": "\\u001b[2J\\n", "ü": 1}'.encode()
    assert len(now()) == len("2026-01-01T00:00:00.000000Z")
    assert now().endswith("Z")


def test_items_are_counted_in_full_batches() -> None:
    told: list[int] = []
    items = counted(iter("abcde"), told.append, every=2)
    assert next(items) + next(items) == "ab"
    assert told == [], "the second one is not done yet"
    assert list(items) == ["c", "d", "e"]
    assert told == [2, 2]


def test_a_bar_appears_on_terminals_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[int] = []
    with progress("export", 5) as advance, polled_progress("verify", lambda: asked.append(1) or 0.5):
        advance(5)
    assert (capsys.readouterr().err, asked) == ("", [])
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress("export", 5) as advance:
        advance(5)
    assert "export" in capsys.readouterr().err


def test_a_failing_poll_does_not_end_the_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(terminal, "_POLL_S", 0)
    asked: list[int] = []
    faults: list[object] = []
    monkeypatch.setattr(threading, "excepthook", faults.append)

    def fail() -> float:
        asked.append(1)
        raise LookupError("the operation has ended")

    with polled_progress("verify", fail):
        while not asked:
            gevent.sleep(0)
    assert (asked, faults) == ([1], [])


@click.command(cls=InterruptibleCommand)
@click.argument("how")
def interrupted(how: str) -> None:
    if how == "text":
        raise KeyboardInterrupt("10 of 20 rows")
    os.kill(os.getpid(), getattr(signal, how))


@pytest.mark.parametrize(
    ("how", "code", "says"),
    [("SIGINT", 130, "Interrupted.\n"), ("SIGTERM", 143, "Interrupted.\n"), ("text", 130, "10 of 20 rows\n")],
)
def test_an_interrupted_command_ends_as_shells_expect(how: str, code: int, says: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    result = CliRunner().invoke(interrupted, [how])
    assert (result.exit_code, result.stderr) == (code, says)
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_interrupt_reaches_its_greenlet_only() -> None:
    """Greenlets of clients go on to send."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    other = gevent.spawn(gevent.sleep, 60)
    for number, kind in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, terminal.Terminated)):
        gevent.get_hub().loop.run_callback(os.kill, os.getpid(), number)
        with pytest.raises(kind), interrupt_this_greenlet():
            gevent.sleep(5)
    assert not other.ready()
    other.kill()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
