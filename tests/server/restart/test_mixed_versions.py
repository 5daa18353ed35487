"""A hot restart from the last release to this one, and back: nothing is lost, and files and clients go on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smqrt.journal import readers
from smqrt.journal.reader import Journal
from smqrt.journal.verification import verify
from tests.conftest import START_S, free_port
from tests.server.restart.hot import HotServed, application, has_ended, heard
from tests.server.restart.publisher import Publisher
from tests.support.device import RAW, TLS, WS
from tests.support.last_release import Release, release
from tests.support.waiting import wait_until

__all__ = ["release"]

pytestmark = pytest.mark.servers

Serve = Callable[..., HotServed]

PRELOAD = """
smq = require "smq.hub".create {
   name = "main", cluster = "chat", persist = "FOLDER/names.db", lastvalue = "state/#",
   journal = {path = "FOLDER/journal", topics = {"news"}},
   onconnect = function(etid, info) smq:publish(tostring(info.restored), "met", etid) end,
}
"""
SAVE = """
import sys
from pathlib import Path
from smqrt.journal.readers import parse_report, save_report
save_report(Path(sys.argv[1]), parse_report(b'{"query": "q", "name": "q", "offset": {"n1": 17}}'))
"""


@pytest.mark.parametrize("is_upgrade", [True, False], ids=["upgrade", "back"])
def test_clients_and_files_go_on(serve_hot: Serve, release: Release, tmp_path: Path, is_upgrade: bool) -> None:
    app = application(tmp_path / "app", PRELOAD.replace("FOLDER", str(tmp_path)))
    lone = application(tmp_path / "other", 'smq = require "smq.hub".create {cluster = "chat"}')
    journal, there = tmp_path / "journal", f"127.0.0.1:{free_port()}"
    words = [app, "--tls-port", "0", "--restart-socket", tmp_path / "door", "--cluster-password", "s"]
    words += ["--cluster-nodes", there]
    versions: list[dict[str, Any]] = [{"cwd": release.folder, "env": release.environment}, {}]
    first, second = versions if is_upgrade else reversed(versions)
    other = serve_hot(lone, "--cluster-password", "s", "--cluster-listen", there)
    before = serve_hot(*words, **first)
    devices = {kind: before.device(kind.encode() + b"-listener", kind) for kind in (RAW, WS, TLS)}
    (topic,) = {one.subscribe(b"news") for one in devices.values()}
    speaker = before.device(b"speaker", WS)
    state = speaker.create(b"state/a")
    speaker.publish(state, b"kept").sync()
    run("-c", SAVE, journal, **first)
    publisher = Publisher(speaker, topic)
    wait_until(lambda: publisher.sent > 50)

    after = serve_hot(*words, "--take-over", **second)
    wait_until(lambda: has_ended(before.pid), lambda: before.output + after.output, START_S)
    assert before.process.wait() == 0, before.output
    at_restart = publisher.sent
    wait_until(lambda: publisher.sent > at_restart + 50)
    publisher.stop()

    due = [b"%d" % number for number in range(publisher.sent)]
    for kind in (RAW, WS):
        assert [devices[kind].receive()[13:] for _ in due] == due, "nobody has lost the connection, nor a message"
    seen = [packet[13:] for packet in devices[TLS].until_end()]
    assert seen == due[: len(seen)], "closed without a Disconnect"
    assert (after.port, after.tls_port) == (before.port, before.tls_port)
    late = after.device(b"newcomer")
    assert (late.subscribe(b"news"), late.subscribe(b"state/a")) == (topic, state)
    assert late.receive()[13:] == b"kept"
    late.publish(devices[RAW].etid, b"to you")
    assert heard(devices[RAW]) == (devices[RAW].etid, b"to you")
    assert after.stop() == 0
    check_journal(journal, due, second)

    again = serve_hot(*words, **first)  # opens the files that the other version has written
    late = again.device(b"newcomer")
    assert (late.subscribe(b"state/a"), late.receive()[13:]) == (state, b"kept")
    late.publish(topic, b"the last").sync()
    assert again.stop() == 0
    check_journal(journal, [*due, b"the last"], first)
    for served in (before, after, again, other):
        assert "Traceback" not in served.output, served.output


def check_journal(journal: Path, due: list[bytes], version: dict[str, Any]) -> None:
    """Check that it has these messages, and where its reader is, as this version and another one see it."""
    end = Journal(journal).end()
    assert [row.payload for row in Journal(journal).rows({}, end, ["news"])] == due
    assert not verify(journal).faults
    assert [one.offset for one in readers.load(journal)] == [{"n1": 17}]
    shown = run("-m", "smqrt", "journal", "tail", journal, "--topic", "news", "-n", 1_000_000, "--json", **version)
    assert [json.loads(line)["payload"].encode() for line in shown.splitlines()] == due
    run("-m", "smqrt", "journal", "verify", journal, **version)


def run(*words: object, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Returns what Python prints, with the package of a version."""
    command = [sys.executable, *map(str, words)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=os.environ | (env or {}), check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
