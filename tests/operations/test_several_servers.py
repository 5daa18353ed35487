"""Commands for operators with several running servers."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Served
from tests.support.applications import application

pytestmark = pytest.mark.servers

Serve = Callable[..., Served]


@pytest.fixture
def runtime(tmp_path: Path) -> dict[str, str]:
    """An environment in which only the servers of the test are found."""
    (tmp_path / "runtime").mkdir()
    return {"XDG_RUNTIME_DIR": str(tmp_path / "runtime")}


def smqrt(runtime: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "smqrt", *words]
    return subprocess.run(command, env=os.environ | runtime, capture_output=True, text=True, timeout=60)


def started(serve: Serve, runtime: dict[str, str], folder: Path) -> Served:
    hub = f'smq = require "smq.hub".create{{name = "{folder.name}"}}'
    served = serve("app", cwd=application(folder / "app", hub).parent, env=runtime)
    assert served.admin_url
    return served


def test_commands_name_the_server_that_answers(serve: Serve, runtime: dict[str, str], tmp_path: Path) -> None:
    assert "No server of this user is running" in smqrt(runtime, "peers").stderr
    one = started(serve, runtime, tmp_path / "one")
    said = f"server {one.admin_url}/, process {one.process.pid}, in {tmp_path}/one\n"
    for words in (("peers",), ("topics",), ("top", "--count", "1"), ("cluster", "status")):
        assert said in smqrt(runtime, *words).stderr, words
    other = started(serve, runtime, tmp_path / "other")
    listed = [json.loads(line) for line in smqrt(runtime, "servers", "--json").stdout.splitlines()]
    assert [entry["url"] for entry in listed] == [f"{other.admin_url}/", f"{one.admin_url}/"]
    assert smqrt(runtime, "servers").stdout.splitlines()[0] == "url\tpid\tfolder"
    found = smqrt(runtime, "top", "--count", "1", "--json")
    for entry in listed:
        assert f"{entry['url']}, process {entry['pid']}, in {entry['folder']}" in found.stderr
    assert "Using the newest; choose another one with --url." in found.stderr
    assert json.loads(found.stdout)["server"]["pid"] == other.process.pid
    named = smqrt(runtime, "top", "--count", "1", "--json", "--url", one.admin_url)
    assert (json.loads(named.stdout)["server"]["pid"], named.stderr) == (one.process.pid, "")


def test_commands_ask_at_a_terminal(serve: Serve, runtime: dict[str, str], tmp_path: Path) -> None:
    for name in ("one", "other"):
        started(serve, runtime, tmp_path / name)
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "smqrt", "topics", "--json"]
    process = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=os.environ | runtime)
    os.close(end)
    printed = b""
    while b"Which one" not in printed:
        printed += os.read(terminal, 4096)
    os.write(terminal, b"2\n")
    while b"server http" not in printed or not printed.rstrip().endswith(b"/one"):
        printed += os.read(terminal, 4096)
    assert process.wait(30) == 0
    os.close(terminal)
