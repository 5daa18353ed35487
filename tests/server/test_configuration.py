"""Files that are reloaded at SIGHUP, and when they change; live settings; checks before the start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import gevent
import pytest

from smqrt.errors import StartError
from smqrt.server.configuration import FileReloader, LiveSettings, check_startable, cluster_plan, http_limits
from smqrt.settings.cluster_settings import ClusterSettings
from smqrt.settings.server_settings import AdminSettings, LogSettings, Settings
from tests.settings.house import Door, House, Lock, house
from tests.support.waiting import wait_until

__all__ = ["house"]


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


# ---- live settings


def test_some_settings_change_while_the_server_runs(house: type[House], caplog: pytest.LogCaptureFixture) -> None:
    told: list[object] = []
    found = [House(size=2, lock=Lock("abus"), door={"a": Door(2)}), House(lock=Lock("abus"))]
    live = LiveSettings(House(), lambda line: None)  # type: ignore[arg-type]  # stands for Settings here
    live.read_with(lambda: found.pop(0), live.current)  # type: ignore[arg-type, return-value]
    live.watch(("size",), told.append)
    live.watch(("lock",), told.append)
    assert live.reload() is None
    assert told == [live.current] == [House(lock=Lock("abus"))]
    assert caplog.messages == ["settings that need a restart to change: door.a, size"]
    assert live.reload() is None
    assert len(told) == len(caplog.messages) == 1


def test_a_part_that_cannot_change_reports_it(house: type[House]) -> None:
    def refuse(_: object) -> None:
        raise StartError("no such lock")

    def wrong() -> Settings:
        raise StartError("line 3 is wrong")

    live = LiveSettings(House(), lambda line: None)  # type: ignore[arg-type]
    live.watch(("lock.kind",), refuse)
    live.read_with(lambda: House(lock=Lock("abus")), live.current)  # type: ignore[arg-type, return-value]
    assert live.reload() == "no such lock"
    live.read_with(wrong, live.current)
    assert live.reload() == "line 3 is wrong"


def test_changes_of_the_program_survive_a_reload(caplog: pytest.LogCaptureFixture) -> None:
    """For example the port 0, which is another one once it is bound."""
    read = Settings(port=0, max_connections=10)
    live = LiveSettings(replace(read, port=4711), lambda line: None)
    live.read_with(lambda: replace(read, max_connections=20), read)
    assert live.reload() is None
    assert (live.current.port, live.current.max_connections) == (4711, 20)
    assert caplog.messages == [], "the port is the same in the file"


def test_watchers_hear_of_their_group_or_setting() -> None:
    read = Settings()
    told: list[str] = []
    lines: list[str] = []
    live = LiveSettings(read, lines.append)
    for names in (("limits",), ("limits.idle_s",), ("limits.head_s",), ("topics", "max_connections")):
        live.watch(names, lambda settings, names=names: told.append(names[0]))
    changed = replace(read, limits=replace(read.limits, idle_s=20.0))
    live.read_with(lambda: changed, read)
    assert live.reload() is None
    assert told == ["limits", "limits.idle_s"]
    assert lines == ["settings changed: limits.idle_s"]
    assert LiveSettings(read, lines.append).reload() is None, "nothing to read"


def test_a_named_table_is_live_if_its_change_is(house: type[House], caplog: pytest.LogCaptureFixture) -> None:
    before = House(door={"a": Door(1, "x"), "b": Door(1, "x")})
    found = [House(door={"a": Door(1, "y"), "b": Door(1, "x")}), House(door={"a": Door(2, "z"), "b": Door(1, "x")})]
    live = LiveSettings(before, lambda line: None)  # type: ignore[arg-type]  # stands for Settings here
    live.read_with(lambda: found.pop(0), before)  # type: ignore[arg-type, return-value]
    live.reload()
    assert live.current.door["a"].word == "y"  # type: ignore[attr-defined]
    assert live.current.door["b"] is before.door["b"]  # type: ignore[attr-defined]
    live.reload()
    assert live.current.door["a"] == Door(1, "y"), "its port is not live"  # type: ignore[attr-defined]
    assert caplog.messages == ["settings that need a restart to change: door.a"]


def test_all_faults_of_a_reload_are_reported() -> None:
    def refuse(settings: Settings) -> None:
        raise StartError(f"not {settings.max_connections}")

    live = LiveSettings(Settings(), lambda line: None)
    live.read_with(lambda: Settings(max_connections=7), Settings())
    for _ in range(2):
        live.watch(("max_connections",), refuse)
    assert live.reload() == "not 7; not 7"


# ---- what parts of the server get of the settings


def test_limits_of_http_have_their_units() -> None:
    settings = Settings(bodies_mib=3)
    settings = replace(settings, limits=replace(settings.limits, head_s=1.5, body_pause_s=2.5))
    found = http_limits(settings)
    assert (found.bodies_bytes, found.header_s, found.body_idle_s) == (3 << 20, 1.5, 2.5)


def test_missing_words_of_a_cluster_are_empty() -> None:
    plan = cluster_plan(ClusterSettings())
    assert (plan.directory, plan.password, plan.ca, plan.cert, plan.key) == (None, "", "", "", "")
    assert cluster_plan(ClusterSettings(directory="/run/links")).directory == Path("/run/links")


# ---- checks before the start


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
def test_the_admin_listener_of_this_machine_needs_no_users(host: str) -> None:
    check_startable(Settings(admin=AdminSettings(host=host)))


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "192.0.2.1"])
def test_an_open_admin_listener_needs_users(host: str) -> None:
    with pytest.raises(StartError, match="gives access to everyone who can reach this machine"):
        check_startable(Settings(admin=AdminSettings(host=host)))
    check_startable(Settings(admin=AdminSettings(host=host, enabled=False)))


@pytest.mark.parametrize(("cert", "key"), [("a", None), (None, "a")])
def test_a_certificate_and_its_key_belong_together(cert: str | None, key: str | None) -> None:
    given, missing = ("--cert", "--key") if cert else ("--key", "--cert")
    with pytest.raises(StartError, match=f"{given} needs {missing} too"):
        check_startable(Settings(cert=cert, key=key))


def test_an_access_log_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside" / "-").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "beside")
    for path in ("", "-", str(tmp_path / "new.log")):
        check_startable(Settings(log=LogSettings(access=path)))
    for path, why in ((tmp_path, "Is a directory"), (tmp_path / "no" / "log", "No such file or directory")):
        with pytest.raises(StartError, match=f"log.access: {path} can't be written: {why}"):
            check_startable(Settings(log=LogSettings(access=str(path))))
    assert list(tmp_path.iterdir()) == [tmp_path / "beside"], "a check creates nothing"
