"""The prompt of `smqrt lua`: code in the environment of a running application."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from gevent import socket

from smqrt.apps.lua.api import smq_hub
from smqrt.apps.lua.watchdog import LoopWatchdog
from smqrt.cli import cli
from smqrt.errors import StartError
from smqrt.operations import lua_prompt
from smqrt.operations.lua_prompt import MAX_PROMPTS, LuaPrompt, PromptLimits, own_socket_name
from smqrt.server.restart import control_socket
from smqrt.settings.server_settings import Settings
from smqrt.smq.gevent_broker import all_brokers
from smqrt.workers.worker_rpc import ChannelError, FdChannel, Message
from tests.apps.lua.app_server import AppServer
from tests.support.waiting import wait_until

WAIT_S = 20.0
PRELOAD = """
hub = require "smq.hub".create()
count = 5
function add(n) count = count + n return count end
function wait() ba.sleep(60000) end
function say(topic, n) for i = 1, n do hub:publish("hello " .. i, topic) end end
"""


class Client:
    """A connection to the prompt."""

    def __init__(self, path: Path, app: str) -> None:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(path))
        self.channel = FdChannel(sock)
        self.send({"do": "open", "app": app})
        self.opened = self.receive()

    def send(self, message: Message) -> None:
        self.channel.send(message)

    def receive(self) -> Message:
        return self.channel.receive(WAIT_S)[0]

    def run(self, code: str) -> tuple[str, str]:
        self.send({"do": "run", "code": code.encode()})
        answer = self.receive()
        return answer["state"], answer["text"]

    def close(self) -> None:
        self.channel.close()


@pytest.fixture
def runtime_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a short path, because paths of sockets are limited."""
    with tempfile.TemporaryDirectory(prefix="lp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder) / "smqrt"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[AppServer]:
    with closing(AppServer(tmp_path)) as server:
        smq_hub.install(server.vm, server.services, server.applications.exchanges)
        server.app({".preload": PRELOAD}, "chat")
        yield server


@pytest.fixture
def prompt(server: AppServer, runtime_folder: Path) -> Iterator[LuaPrompt]:
    with closing(LuaPrompt(server.vm, server.applications.all, PromptLimits(WAIT_S, WAIT_S))) as prompt:
        prompt.start()
        yield prompt


@pytest.fixture
def opened(prompt: LuaPrompt, runtime_folder: Path) -> Iterator[Callable[[str], Client]]:
    clients: list[Client] = []

    def connect(app: str) -> Client:
        clients.append(Client(runtime_folder / own_socket_name(), app))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


def test_code_runs_in_the_application(opened: Callable[[str], Client]) -> None:
    client = opened("/chat/")
    assert client.opened == {"do": "opened", "app": "/chat/"}
    assert client.run("count, 'a\\nb'") == ("done", '5\n"a\\nb"\n')
    assert client.run("add(2)") == ("done", "7\n")
    assert client.run("count = 1") == ("done", "")
    assert client.run("print(count, nil) return add(1)") == ("done", "1\tnil\n2\n")
    assert client.run("for i = 1, 2 do") == ("more", "")
    assert client.run("for i = 1, 2 do\nprint(i) end") == ("done", "1\n2\n")
    assert client.run("x = 'ä' return #x") == ("done", "2\n")
    assert client.run("x = 1 '<eof>'")[0] == "error"
    assert opened("chat").run("count") == ("done", "2\n")  # another prompt, the same variables


def test_errors_are_shown_and_the_prompt_goes_on(opened: Callable[[str], Client]) -> None:
    client = opened("chat")
    state, text = client.run("x = = 1")
    assert (state, text.splitlines()[0]) == ("error", "prompt:1: unexpected symbol near '='")
    state, text = client.run("count = count +\nnil")
    assert state == "error"
    assert text.startswith("prompt:1: attempt to perform arithmetic on a nil value")
    assert client.run("error({})")[1].startswith("(error object is a table value)")
    assert client.run("error(setmetatable({}, {__tostring = function() error 'no' end}))")[0] == "error"
    assert client.run("add(1)") == ("done", "6\n")


def test_tables_have_a_bounded_depth_and_width(opened: Callable[[str], Client]) -> None:
    client = opened("chat")
    assert client.run("{1, 'two', x = {y = true}, ['a b'] = {}}")[1] == (
        '{\n  1,\n  "two",\n  ["a b"] = {},\n  x = {\n    y = true\n  }\n}\n'
    )
    assert "{...}" in client.run("{{{{5}}}}")[1]
    assert "(this table again)" in client.run("local t = {} t.t = t return t")[1]
    wide = client.run("local t = {} for i = 1, 1000 do t[i] = i end return t")[1]
    assert (wide.count("\n"), wide.endswith("  50,\n  ...\n}\n")) == (53, True)
    assert client.run("('x'):rep(5000)")[1].endswith('"... (5000 bytes)\n')
    assert client.run("setmetatable({1}, {__index = error, __pairs = error, __len = error})")[0] == "done"
    state, text = client.run("for i = 1, 100000 do print(i) end")
    assert (state, text.endswith("... (output ends after 65536 bytes)\n")) == ("done", True)
    assert len(text) < 66_000
    assert client.run("dir, io")[0] == "done"  # objects of the server
    assert client.run("'\\27[2J'")[1] == '"\\27[2J"\n'
    assert "\x1b" not in client.run("print '\\27[2J'")[1]  # nothing reaches the terminal as it is


def test_a_call_that_waits_ends_after_the_limit_or_by_stop(
    server: AppServer, runtime_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(LuaPrompt(server.vm, server.applications.all, PromptLimits(0.05, WAIT_S))) as prompt:
        prompt.start()
        with closing(Client(runtime_folder / own_socket_name(), "chat")) as client:
            state, text = client.run("print 'begin' wait() print 'end'")
            assert (state, text) == ("error", "begin\nended after 0.05 s, the limit admin.lua_prompt_s")
            assert client.run("count") == ("done", "5\n")
    assert server.vm.activities.blocked == 0


def test_stop_ends_a_call(server: AppServer, opened: Callable[[str], Client]) -> None:
    client = opened("chat")
    client.send({"do": "run", "code": b"wait()"})
    wait_until(lambda: server.vm.activities.blocked == 1)
    client.send({"do": "stop"})
    assert client.receive() == {"do": "done", "state": "error", "text": "interrupted"}
    assert client.run("count") == ("done", "5\n")
    client.send({"do": "run", "code": b"wait()"})
    wait_until(lambda: server.vm.activities.blocked == 1)
    client.close()  # so does the end of the connection
    wait_until(lambda: server.vm.activities.blocked == 0)


@pytest.fixture
def _watched(server: AppServer) -> Iterator[None]:
    watchdog = LoopWatchdog(server.vm, loop_s=60)
    watchdog.start()
    yield
    watchdog.stop()


@pytest.mark.usefixtures("_watched")
@pytest.mark.parametrize(
    "code",
    [
        "while true do end",
        "coroutine.wrap(function() while true do end end)()",
        "while true do pcall(function() while true do end end) end",
        "while true do print(count) end",
        "local t = {} while true do t[#t + 1] = ('x'):rep(1000) end",
    ],
)
def test_a_call_that_computes_ends_after_the_limit(server: AppServer, runtime_folder: Path, code: str) -> None:
    with closing(LuaPrompt(server.vm, server.applications.all, PromptLimits(WAIT_S, 0.05))) as prompt:
        prompt.start()
        with closing(Client(runtime_folder / own_socket_name(), "chat")) as client:
            before_s = time.thread_time()
            state, text = client.run(code)
            used_s = time.thread_time() - before_s
            assert state == "error"
            assert "this ran for 0.05 s without yielding" in text or text.endswith("(output ends after 65536 bytes)\n")
            assert used_s < 1
            # A call that yields has no such limit, and neither has the application.
            slices = "for i = 1, 8 do local stop = os.clock() + 0.01 repeat until os.clock() > stop ba.sleep(1) end"
            assert client.run(slices) == ("done", "")
            assert server.vm.eval("local stop = os.clock() + 0.2 repeat until os.clock() > stop return 1") == (1,)
            client.close()
            wait_until(lambda: not server.vm.activities.limits)


def test_an_application_at_the_root_has_two_names(server: AppServer, opened: Callable[[str], Client]) -> None:
    server.app({".preload": "x = 1"})
    assert opened("-").run("x") == ("done", "1\n")
    assert opened("root").run("x") == ("done", "1\n")


def test_topics_are_watched_with_a_bound(opened: Callable[[str], Client]) -> None:
    client, other = opened("chat"), opened("chat")
    client.send({"do": "watch", "topic": "news", "hub": None})
    broker = next(one for one in all_brokers() if one.app == "chat")
    tid = broker.topic_table.by_name
    wait_until(lambda: "news" in str(list(tid)))
    assert other.run("say('news', 2)")[0] == "done"
    rows = [client.receive() for _ in range(2)]
    assert [(row["topic"], row["text"]) for row in rows] == [("news", "hello 1"), ("news", "hello 2")]
    assert other.run("say('news', 1000)")[0] == "done"
    seen = missed = 0
    while seen + missed < 1000:
        row = client.receive()
        seen, missed = seen + ("text" in row), missed + row.get("missed", 0)
    assert missed > 900
    client.send({"do": "stop"})
    assert client.receive()["text"] == "interrupted"
    client.send({"do": "watch", "topic": "news", "hub": 999})
    assert client.receive()["text"] == "this process has no hub with this number"
    other.run("second = require 'smq.hub'.create()")
    client.send({"do": "watch", "topic": "news"})
    assert "has several hubs" in client.receive()["text"]


def test_an_idle_prompt_is_closed(opened: Callable[[str], Client], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lua_prompt, "IDLE_S", 0.05)
    client, idle = opened("chat"), opened("chat")
    client.send({"do": "watch", "topic": "news"})
    with pytest.raises(ChannelError):
        idle.receive()
    monkeypatch.setattr(lua_prompt, "IDLE_S", WAIT_S)
    client.send({"do": "stop"})  # the one that watches is not idle
    assert client.receive()["text"] == "interrupted"


def test_lines_are_logged(opened: Callable[[str], Client], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "smqrt.admin"):
        opened("chat").run("add(1)\n--" + "x" * 2000)
    lines = [record.getMessage() for record in caplog.records]
    who = f"process {os.getpid()} of user {os.getuid()}, application /chat/"
    assert f"lua prompt: opened by {who}" in lines
    line = next(line for line in lines if line.startswith(f"lua prompt: {who}: add(1)"))
    assert line.endswith("... (2009 characters)")
    assert len(line) < 700
    assert "\n" not in line


def test_applications_without_a_prompt(server: AppServer, opened: Callable[[str], Client]) -> None:
    server.app({".preload.py": "x = 1"}, "python")
    server.app({".preload": "error 'no'"}, "failed")
    assert opened("python").opened["why"].startswith("the application /python/ is in Python")
    assert "no" in opened("failed").opened["why"]
    assert opened("gone").opened["why"] == (
        "there is no application 'gone'; the server has: chat, python, failed (- is the one at /)"
    )


def test_the_number_of_prompts_is_bounded(opened: Callable[[str], Client]) -> None:
    clients = [opened("chat") for _ in range(MAX_PROMPTS)]
    assert "4 prompts are open" in opened("chat").opened["why"]
    clients[0].close()
    wait_until(lambda: opened("chat").opened["do"] == "opened")


def test_other_users_are_refused(
    prompt: LuaPrompt, runtime_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = runtime_folder / own_socket_name()
    assert path.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(control_socket.FdChannel, "peer", lambda self: (77, 12345))
    with pytest.raises(ChannelError):
        Client(path, "chat")
    assert "refused: a process of user 12345 (pid 77) at admin.lua_prompt" in caplog.text


def test_a_folder_of_others_is_not_used(server: AppServer, runtime_folder: Path) -> None:
    runtime_folder.mkdir()
    runtime_folder.chmod(0o777)
    with pytest.raises(StartError, match="other users have access"):
        LuaPrompt(server.vm, server.applications.all, PromptLimits(1, 1)).start()


def test_the_prompt_is_off_by_default() -> None:
    assert Settings().admin.lua_prompt is False


def test_a_broken_client_ends_only_its_own_prompt(opened: Callable[[str], Client]) -> None:
    for message in ({"do": "what"}, {"do": "run", "code": "text"}, {"do": "run", "code": b"x" * 300_000}):
        client = opened("chat")
        with suppress(ChannelError):  # the server closes the connection before it has read all
            client.send(message)
        with pytest.raises(ChannelError):
            client.receive()
    assert opened("chat").run("count") == ("done", "5\n")


# ---- the command, with a real server


def command(*words: str, text: str = "") -> Result:
    """Run `smqrt lua` in this process, as the imports of a new one take seconds on a loaded machine."""
    return CliRunner().invoke(cli, ["lua", *words], input=text)


@contextmanager
def terminating(process: subprocess.Popen[str]) -> Iterator[None]:
    """Kill a process after a failure, since the exit of Popen waits for it."""
    try:
        yield
    except BaseException:
        process.kill()
        raise


@pytest.mark.servers
def test_the_command_with_a_server(tmp_path: Path, runtime_folder: Path, serve: Any) -> None:
    app = tmp_path / "chat"
    app.mkdir()
    (app / ".preload").write_text(PRELOAD)
    environment = {"XDG_RUNTIME_DIR": str(runtime_folder.parent)}
    none = command("chat", "-e", "1")
    assert (none.exit_code, "set admin.lua_prompt = true" in none.stderr) == (1, True)
    served = serve(app, env=environment | {"SMQRT_ADMIN__LUA_PROMPT": "true"})
    assert served.port
    done = command("-", "-e", "add(2), {1}")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "7\n{\n  1\n}\n", "")
    failed = command("-", "-e", "add()")
    assert (failed.exit_code, failed.stdout) == (1, "")
    assert "attempt to perform arithmetic on a nil value (local 'n')" in failed.stderr
    several = command("-", text="add(1)\nfor i = 1, 2 do\n print(i)\nend\n:help\n:what\nx = 1\nx\nif\n")
    assert several.stdout.startswith("8\n1\n2\nA line is Lua")
    assert several.stdout.endswith("1\n")
    assert several.stderr.splitlines() == [
        "no such command, or wrong arguments; :help lists the commands",
        "the input ends within a statement",
    ]
    unknown = command("gone", "-e", "1")
    assert unknown.stderr.startswith("Error: there is no application 'gone'")
    endless = command("-", "-e", "while true do end")
    assert endless.exit_code == 1
    assert "this ran for 0.05 s without yielding" in endless.stderr
    assert command("-", "-e", "1").stdout == "1\n"  # the server goes on
    with subprocess.Popen(
        [sys.executable, "-m", "smqrt", "lua", "-"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | environment,
    ) as interactive, terminating(interactive):  # fmt: skip
        assert interactive.stdin
        assert interactive.stdout
        interactive.stdin.write(":watch news\n")
        interactive.stdin.flush()
        served.wait_for("watches news")
        command("-", "-e", "say('news', 1)")
        assert interactive.stdout.readline() == "news from 1: hello 1\n"
        interactive.send_signal(signal.SIGINT)  # ends the call, not the prompt
        interactive.stdin.write("print 'ready' wait()\n")
        interactive.stdin.flush()
        served.wait_for("print 'ready' wait")
        interactive.send_signal(signal.SIGINT)
        output, errors = interactive.communicate("1 + 1\n", timeout=60)
    assert (output, errors, interactive.returncode) == ("2\n", "interrupted\nready\ninterrupted\n", 0)
    assert served.stop() == 0
    assert list(runtime_folder.iterdir()) == []


@pytest.mark.servers
def test_each_worker_has_a_prompt(tmp_path: Path, runtime_folder: Path, serve: Any) -> None:
    (tmp_path / "smqrt.toml").write_text("[admin]\nlua_prompt = true\n")
    (tmp_path / "app").mkdir()
    (tmp_path / "app/.preload").write_text("x = mako.argv[1]")
    served = serve("app", "--workers", "2", cwd=tmp_path, env={"XDG_RUNTIME_DIR": str(runtime_folder.parent)})
    assert served.port
    pids = []
    for worker in ("0", "1"):
        served.wait_for(f"listening at .*-{worker}[.]sock")
        done = command("-", "--worker", worker, "-e", "own = 1 return own")
        assert (done.stdout, done.stderr) == ("1\n", "")
        pids.append(next(runtime_folder.glob(f"lua-*-{worker}.sock")).name.split("-")[1])
    assert pids == [str(served.process.pid)] * 2
    missing = command("-", "--worker", "2", "-e", "1")
    assert "no running server of this user has a Lua prompt (worker 2)" in missing.stderr
