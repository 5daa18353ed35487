"""A browser that logs in at one worker is known at all: real processes, and what happens when one of them dies."""

from __future__ import annotations

import http.client
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlencode

import pytest

from tests.conftest import Served
from tests.support.waiting import wait_until
from tests.workers.served import command, workers_of

pytestmark = pytest.mark.servers

FILES = {
    ".preload": """
local users = ba.create.authuser(function(name, password) return name == "ann" and "secret" end)
local function page(_ENV) response:write "log in" end
local guard = ba.create.authenticator(users, {type = "form", response = page})
local inside = ba.create.dir "inside"
inside:setfunc(function(_ENV)
  local name = guard:authenticate(request, "")
  if name then response:write(mako.worker, " ", name) end
  return true
end)
dir:insert(inside, true)
""",
    "session.lsp": """<?lsp
local s = request:session(true)
s.visits = (s.visits or 0) + 1
s.list = s.list or {}
s.list[#s.list + 1] = mako.worker
response:write(mako.worker, " ", s.visits, " ", #s.list)
?>""",
    "once.lsp": "<?lsp response:write(mako.worker, ' ', tostring(request:login(request:data 'name', 1, false))) ?>",
    "out.lsp": "<?lsp response:write(mako.worker, ' ', tostring(request:logout())) ?>",
}


@pytest.fixture
def app(tmp_path: Path) -> Path:
    folder = tmp_path / "app"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


class Browser:
    """A client with a cookie, and a connection of its own for each request, so that the kernel chooses a worker."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self.cookie = ""

    def ask(self, path: str, fields: dict[str, str] | None = None) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self._served.port, timeout=10)
        headers = {"Cookie": self.cookie} if self.cookie else {}
        body = urlencode(fields) if fields else None
        if body:
            headers["Content-Type"] = "application/x-www-form-urlencoded"
        connection.request("POST" if body else "GET", path, body, headers)
        answer = connection.getresponse()
        self.cookie = (answer.getheader("Set-Cookie") or self.cookie).partition(";")[0]
        text = answer.read().decode()
        connection.close()
        return text

    def at(self, worker: int, path: str) -> str:
        """What a worker answers, without its number."""
        found: list[str] = []

        def is_there() -> bool:
            found[:] = [self.ask(path)]
            return found[0].startswith(f"{worker} ")

        wait_until(is_there, found)
        return found[0][2:]


def test_sessions_and_logins_outlive_workers(serve: Callable[..., Served], app: Path) -> None:
    served = serve(app, "--workers", "2", "--restart-socket", app.parent / "restart.sock")
    pids = workers_of(served)
    visitor, ann = Browser(served), Browser(served)
    seen = [visitor.ask("/session.lsp").split() for _ in range(40)]
    assert {one[0] for one in seen} == {"0", "1"}
    assert [one[1:] for one in seen] == [[str(count)] * 2 for count in range(1, 41)]

    assert ann.ask("/inside/x") == "log in"
    ann.ask("/inside/x", {"ba_username": "ann", "ba_password": "secret"})
    assert [ann.at(worker, "/inside/x") for worker in (0, 1)] == ["ann", "ann"]

    # Many at the same moment, of whom one may.
    for name in ("eve", "bob", "kim"):
        with ThreadPoolExecutor(16) as crowd:
            told = list(crowd.map(lambda path: Browser(served).ask(path), [f"/once.lsp?name={name}"] * 32))
        assert sum(one.endswith("true") for one in told) == 1
        assert len({one[0] for one in told}) == 2

    # The first worker, where most was written, is killed; and then every process is replaced.
    os.kill(pids[0], signal.SIGKILL)
    assert ann.ask("/inside/x") == "1 ann"
    wait_until(lambda: workers_of(served)[0] != pids[0], served.lines)
    assert ann.at(0, "/inside/x") == "ann"
    done = command("restart", "--pid", served.process.pid)
    assert done.returncode == 0, done.stderr
    assert set(workers_of(served).values()).isdisjoint(pids.values())
    assert [ann.at(worker, "/inside/x") for worker in (0, 1)] == ["ann", "ann"]
    assert visitor.ask("/session.lsp").split()[1:] == ["41", "41"]

    # Out at one is out at all.
    assert ann.ask("/out.lsp")[2:] == "true"
    assert {ann.ask("/inside/x") for _ in range(10)} == {"log in"}
    assert served.stop() == 0
    assert "Traceback" not in served.output
    assert "tried again" not in served.output
