"""Files that are reloaded at SIGHUP, and when they change."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import gevent
import pytest

from smqrt.server.configuration import FileReloader
from tests.support.waiting import wait_until


class Table:
    """A part: a file, read into `value`; broken when it says so."""

    def __init__(self, path: Path) -> None:
        self.path, self.value, self.reads = path, path.read_text(), 0

    def reload(self) -> str | None:
        self.reads += 1
        text = self.path.read_text()
        if text == "raise":
            raise RuntimeError("a bug")
        if text == "broken":
            return "it is broken"
        self.value = text
        return None


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def reloader(lines: list[str]) -> Iterator[FileReloader]:
    made = FileReloader(lines.append, poll_s=0.02)
    yield made
    made.stop()


@pytest.fixture
def table(tmp_path: Path, reloader: FileReloader) -> Table:
    path = tmp_path / "table"
    path.write_text("one")
    made = Table(path)
    reloader.add("tables", made.reload, lambda: [path])
    return made


def test_a_change_is_read_once(reloader: FileReloader, table: Table, lines: list[str]) -> None:
    reloader.start()
    reloader.start()
    table.path.write_text("two")
    wait_until(lambda: table.value == "two")
    gevent.sleep(0.1)
    assert table.reads == 1
    assert lines == ["tables reloaded"]


def test_a_file_that_is_still_written_is_not_read(reloader: FileReloader, table: Table) -> None:
    reloader.start()
    with table.path.open("w") as file:
        for number in range(30):
            file.write(f"{number} ")
            file.flush()
            os.utime(table.path, ns=(number, number))
            gevent.sleep(0.01)
        assert table.reads == 0
        file.write("whole")
    wait_until(lambda: table.value.endswith("whole"))
    assert table.reads == 1


@pytest.mark.parametrize("text", ["broken", "raise"])
def test_a_fault_is_reported_once_and_keeps_previous_values(
    reloader: FileReloader, table: Table, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    reloader.start()
    table.path.write_text(text)
    fault = {"broken": "it is broken", "raise": "RuntimeError: a bug"}[text]
    wait_until(lambda: f"tables not reloaded: {fault}" in caplog.messages, caplog.messages)
    gevent.sleep(0.1)
    assert (table.value, table.reads) == ("one", 1)
    table.path.write_text("three")
    wait_until(lambda: table.value == "three")


def test_a_file_that_was_replaced_or_is_gone(
    reloader: FileReloader, table: Table, caplog: pytest.LogCaptureFixture
) -> None:
    reloader.start()
    other = table.path.with_name("other")
    other.write_text("two")
    os.utime(other, ns=(table.path.stat().st_mtime_ns,) * 2)  # the same size and time: another inode
    other.replace(table.path)
    wait_until(lambda: table.value == "two")
    table.path.unlink()
    wait_until(lambda: any("No such file" in message for message in caplog.messages))
    table.path.write_text("two")
    wait_until(lambda: table.reads == 3)


def test_asking_a_hundred_times_reads_once_or_twice(reloader: FileReloader, table: Table, lines: list[str]) -> None:
    table.path.write_text("two")
    reloader.start()
    for _ in range(100):
        reloader.ask()
    wait_until(lambda: table.value == "two")
    gevent.sleep(0.1)
    assert 1 <= table.reads <= 2, "the watch does not read once more what SIGHUP has read"


def test_one_that_fails_does_not_hinder_the_others(reloader: FileReloader, table: Table, lines: list[str]) -> None:
    reloader.add("others", lambda: None)
    table.path.write_text("broken")
    assert reloader.run() == {"tables": "it is broken"}
    assert lines == ["others reloaded"]


def test_unknown_files_of_one_do_not_affect_others(reloader: FileReloader, table: Table) -> None:
    known = [table.path]
    reloader.add("others", lambda: None, lambda: [known[0]])
    known.clear()
    reloader.start()
    table.path.write_text("two")
    wait_until(lambda: table.value == "two")
    gevent.sleep(0.1)
    table.path.write_text("three")
    wait_until(lambda: table.value == "three")


def test_nothing_to_read(reloader: FileReloader, lines: list[str]) -> None:
    assert reloader.run() == {}
    assert lines == ["nothing to reload"]


def test_after_stop_nothing_is_read(reloader: FileReloader, table: Table) -> None:
    reloader.start()
    reloader.stop()
    reloader.stop()
    table.path.write_text("two")
    gevent.sleep(0.1)
    assert table.reads == 0
