"""The access log: its lines, what they hide, and what becomes of them when the disk does not take them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from smqrt.errors import CloseReason
from smqrt.operations import access_log
from smqrt.operations.access_log import LINES, MAX_PATH_CHARS, AccessLog, without_query_secrets
from smqrt.smq import close_log
from tests.support.waiting import wait_until

Open = Callable[..., AccessLog]


@pytest.fixture
def open_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """`open_log(path, as_json)`; it is closed after the test."""
    monkeypatch.setattr(access_log, "COLLECT_S", 0)
    before, made = list(close_log.observers), list[AccessLog]()

    def start(path: Path | str, as_json: bool = False) -> AccessLog:
        made.append(AccessLog(str(path), as_json))
        return made[-1]

    yield start
    for one in made:
        one.close()
        one.close()
    assert close_log.observers == before


def request(target: str = "/", user: str = "", status: int = 200) -> Any:
    login = SimpleNamespace(name=user) if user else None
    response = SimpleNamespace(status=status, size=5)
    return SimpleNamespace(
        env={}, peer=("192.0.2.1", 1), method="GET", target=target, response=response, user=lambda: login
    )


def written(log: AccessLog) -> list[str]:
    log.close()
    return Path(log.path).read_text().splitlines()


def test_a_line_has_its_values_in_order(open_log: Open, tmp_path: Path) -> None:
    log = open_log(tmp_path / "access.log")
    one = request('/a"b\x1b c?token=hush', user='an"n', status=404)
    log.began(one)
    log.ended(one, is_detached=False)
    log.ended(request("/socket"), is_detached=True)
    log.refused("192.0.2.2", 400, 'bad "line"')
    first, detached, refused = (line.partition(" ")[2] for line in written(log))
    before, _, ms = first.rpartition(" ")
    assert before == '192.0.2.1 "an\'n" GET "/a\'b\\x1b c?token=***" 404 5'
    assert float(ms) >= 0
    assert detached == '192.0.2.1 "" GET "/socket" 101 5 -'
    assert refused == '192.0.2.2 "" - "" 400 0 - "bad \'line\'"'


def test_json_has_a_line_for_requests_and_connections(open_log: Open, tmp_path: Path) -> None:
    log = open_log(tmp_path / "access.log", as_json=True)
    facts = {"hub": 1, "user": "ann", "address": "192.0.2.1", "reason": CloseReason.SHUTDOWN, "connected_s": 1.23456}
    closed: Any = SimpleNamespace(uid=b"\xff" + b"x" * 300, bytes_sent=7, bytes_received=9, **facts)
    log.connection_closed(closed)
    closed.connected_s = None
    log.connection_closed(closed)
    first, second = (json.loads(line) for line in written(log))
    assert first.pop("time")[:2] == "20"
    assert first == {
        "event": "access", "address": "192.0.2.1", "user": "ann", "method": "SMQ", "path": "hub 1",
        "status": "shutdown", "bytes": 7, "ms": 1234.6, "uid": "\\xff" + "x" * 252, "bytes_received": 9,
    }  # fmt: skip
    assert second["ms"] is None


def test_a_user_that_cannot_be_found_is_none(open_log: Open, tmp_path: Path) -> None:
    def fail() -> None:
        raise LookupError("a function of the application")

    log, one = open_log(tmp_path / "access.log"), request()
    one.user = fail
    log.ended(one, is_detached=False)
    assert ' "" GET ' in written(log)[0]


@pytest.mark.parametrize(
    ("target", "shown"),
    [
        ("/a?user=ann&token=x&b=c", "/a?user=ann&token=***&b=c"),
        ("/a?my-Api_KEY2=x#y", "/a?my-Api_KEY2=***#y"),
        ("/a?passe=1&x=token", "/a?passe=***&x=token"),
        ("/a?code=", "/a?code=***"),
        ("/token=x?a=b", "/token=***?a=b"),
        ("/" + "x" * 5000, "/" + "x" * (MAX_PATH_CHARS - 1)),
    ],
)
def test_values_of_secret_parameters_are_hidden(target: str, shown: str) -> None:
    assert without_query_secrets(target) == shown


def test_a_full_queue_discards_and_counts(open_log: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_log, "MAX_QUEUED_LINES", 2)
    log = open_log(tmp_path / "access.log", as_json=True)
    for number in range(5):
        log.ended(request(f"/{number}"), is_detached=False)
    lines = [json.loads(line) for line in written(log)]
    assert [line.get("path", line.get("detail")) for line in lines] == ["/0", "/1", "3 lines were discarded"]
    assert LINES.count == 3


def test_lines_a_full_disk_loses_are_counted(open_log: Open, tmp_path: Path) -> None:
    (tmp_path / "access.log").symlink_to("/dev/full")
    log = open_log(tmp_path / "access.log", as_json=True)
    for number in range(3):
        log.ended(request(f"/{number}"), is_detached=False)
    wait_until(lambda: LINES.count)
    (tmp_path / "access.log").unlink()
    assert log.reopen() is None
    log.ended(request("/after"), is_detached=False)
    lines = [json.loads(line) for line in written(log)]
    assert [line.get("path", line.get("detail")) for line in lines] == ["/after", "3 lines were discarded"]


def test_a_torn_line_is_ended_first(open_log: Open, tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    path.write_text('{"torn": ')
    log = open_log(path)
    log.ended(request("/next"), is_detached=False)
    wait_until(lambda: path.read_bytes().endswith(b"\n"))
    log.ended(request("/last"), is_detached=False)
    torn, following, last = written(log)
    assert torn == '{"torn": '
    assert ("/next" in following, "/last" in last) == (True, True)


def test_a_renamed_file_is_left_at_reopen(open_log: Open, tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    log = open_log(path)
    path.rename(tmp_path / "access.1")
    log.ended(request("/before"), is_detached=False)
    wait_until(lambda: (tmp_path / "access.1").read_text())
    assert log.reopen() is None
    assert os.stat(path).st_mode & 0o777 & ~0o640 == 0, "others may not read it"
    log.ended(request("/after"), is_detached=False)
    assert [("/after" in line) for line in written(log)] == [True]
    assert "/after" not in (tmp_path / "access.1").read_text()


def test_a_file_that_cannot_be_reopened_stays(open_log: Open, tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    log = open_log(folder / "access.log")
    folder.rename(tmp_path / "moved")
    error = log.reopen()
    assert error is not None
    assert error.startswith(f"{folder}/access.log: ")
    log.ended(request("/after"), is_detached=False)
    log.close()
    assert "/after" in (tmp_path / "moved/access.log").read_text()
