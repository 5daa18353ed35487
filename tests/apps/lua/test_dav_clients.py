"""WebDAV clients from Debian against a file server: cadaver, and litmus, which tests servers."""

from __future__ import annotations

import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Served
from tests.support.waiting import wait_until

PRELOAD = """
require "wfs"
io:mkdir "shared"
files = ba.create.wfs("fs", ba.mkio(io, "shared"), ".LOCK")
local users = ba.create.jsonuser()
users:set {ann = "secret"}
files:setauth(ba.create.authenticator(users, {type = "dav"}))
dir:insert(files, true)
"""
SUITES = ("basic", "copymove", "props", "locks", "http")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("dav")
    (folder / ".preload").write_text(PRELOAD)
    running = Served(folder)
    yield running
    running.stop()


@pytest.mark.servers
@pytest.mark.parametrize("suite", SUITES)
def test_litmus(served: Served, suite: str, tmp_path: Path) -> None:
    command = ["litmus", f"{served.url}/fs/", "ann", "secret"]
    done = subprocess.run(
        command, cwd=tmp_path, env={"TESTS": suite, "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    found = re.search(r"of (\d+) tests run: (\d+) passed, (\d+) failed", done.stdout)
    assert found is not None, done.stdout + done.stderr
    failed = [line for line in done.stdout.replace("\r", "\n").splitlines() if "FAIL (" in line]
    assert found[3] == "0", failed


SESSION = """\
put {source}/a.txt ä\\ b.txt
lock ä\\ b.txt
put {source}/longer.txt ä\\ b.txt
unlock ä\\ b.txt
mkcol folder
move ä\\ b.txt folder/
copy folder kept
rmcol folder
get kept/ä\\ b.txt {source}/back.txt
ls
quit
"""


@pytest.mark.servers
def test_cadaver(served: Served, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short")
    (tmp_path / "longer.txt").write_text("longer" * 100_000)
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login ann password secret\n")
    (tmp_path / ".netrc").chmod(0o600)
    done = subprocess.run(
        ["cadaver", f"{served.url}/fs/"],
        input=SESSION.format(source=tmp_path).encode(),
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
        capture_output=True,
        timeout=60,
    )
    assert (tmp_path / "back.txt").read_text() == "longer" * 100_000, done.stdout.decode()
    assert b"failed" not in done.stdout, done.stdout.decode()


@pytest.mark.servers
def test_an_unfinished_upload_leaves_nothing_at_shutdown(tmp_path: Path, serve: Any) -> None:
    (tmp_path / ".preload").write_text('dir:insert(ba.create.dav("fs", io), true)')
    served = serve(tmp_path)
    with socket.create_connection(("127.0.0.1", served.port)) as client:
        client.sendall(b"PUT /fs/a.txt HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nhalf")
        wait_until(lambda: list(tmp_path.glob(".smqrt-upload*")))
        served.stop()
    assert [path.name for path in tmp_path.iterdir()] == [".preload"]
