"""The manual: its commands are run, its examples too, its links lead somewhere, and nothing is left out of it."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import click
import pytest

import smqrt.server.runtime  # noqa: F401 - it declares all limits
from smqrt import hub
from smqrt.broker import outbox
from smqrt.broker.outbox import Drop
from smqrt.errors import CloseReason
from smqrt.http.body import HttpLimits
from smqrt.http.head import MAX_FIELDS
from smqrt.manual.pages import pages as manual
from smqrt.operations import metrics
from smqrt.settings.option_types import environment_name, flag
from smqrt.settings.server_settings import limits_manual, table
from smqrt.smq import close_log, data_path
from smqrt.transport.tls import HANDSHAKE_S, LINGER_S
from smqrt.wire.smq import MAX_PAYLOAD_BYTES
from tests.conftest import REPOSITORY, free_port
from tests.support import npm

HELP = REPOSITORY / "smqrt" / "help"
PAGES = [
    REPOSITORY / "README.md",
    *sorted(HELP.rglob("*.md")),
    *sorted((REPOSITORY / "app_preload").glob("*/README.md")),
]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^(?:--|#|//|<!--|<\?lsp --) (\S+/\S+?)(, added at the end)?(?: -->)?$")
STAYS = re.compile(
    r"scripts/serve|smqrt serve|python \S*(?:device|server)\.py|smqrt sub (?!.*--count)|mosquitto_sub (?!.* -C )"
)
ENDS = re.compile(r"raw/device\.py")
WAIT_S = 90


def name(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def blocks(page: Path, kind: str) -> Iterator[str]:
    return (text for found, text in BLOCK.findall(page.read_text("utf-8")) if found == kind)


# ---- commands


class Terminal:
    """Runs the commands of a page in a folder of its own, on ports of its own.

    A command that serves or listens goes on until the page ends; it is enough that the shown lines come.

    Args:
        folder: where they run.
        python: of the environment whose commands they are.
    """

    def __init__(self, folder: Path, python: str) -> None:
        self.folder = folder
        self.ports = {str(shown): str(free_port()) for shown in (9357, 9358, 9359, 9443)}
        path = os.pathsep.join([str(Path(python).parent), str(npm.COMMANDS), os.environ["PATH"]])
        self.env = os.environ | npm.QUIET | {"PATH": path, "SMQRT_PORT": self.ports["9357"], "PYTHONUNBUFFERED": "1"}
        self.env["XDG_CACHE_HOME"] = str(folder / "cache")
        self.running: list[tuple[str, subprocess.Popen[str]]] = []

    def run(self, command: str, expected: list[str]) -> None:
        seen = self._stay(command, expected) if stays(command) else self._finish(command)
        shown = [self.translated(line, back=True) for line in seen]
        for wanted, line in zip(expected, shown, strict=False):
            assert fits(wanted, line), f"{command}: the page shows {wanted!r}, it printed {line!r}"
        assert len(shown) >= len(expected), f"{command}: the page shows {expected[len(shown) :]}, it printed {shown}"

    def _start(self, command: str) -> subprocess.Popen[str]:
        text = self.translated(command).replace("scripts/serve", "smqrt serve")
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        start = "exec " if stays(text) else ""
        return subprocess.Popen(["bash", "-c", start + text], cwd=self.folder, env=self.env, **options)

    def translated(self, text: str, back: bool = False) -> str:
        """At once: a real port may have the digits of another one that is shown."""
        numbers = {real: shown for shown, real in self.ports.items()} if back else self.ports
        return re.sub("|".join(numbers), lambda found: numbers[found[0]], text)

    def _finish(self, command: str) -> list[str]:
        output, _ = (process := self._start(command)).communicate(timeout=WAIT_S)
        assert process.returncode == 0, f"{command}: exit code {process.returncode}\n{output}"
        return output.splitlines()

    def _stay(self, command: str, expected: list[str]) -> list[str]:
        if is_server(command):
            self._stop_servers(port_of(command))  # as the reader does, with Ctrl-C
        process = self._start(command)
        self.running.append((command, process))
        seen: list[str] = []
        assert process.stdout
        stream = process.stdout
        threading.Thread(target=lambda: seen.extend(line.rstrip("\n") for line in stream), daemon=True).start()
        deadline = time.monotonic() + WAIT_S
        while len(seen) < len(expected) and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.02)
        time.sleep(0 if expected else 0.7)
        assert process.poll() is None, f"{command} ended: {seen}"
        return list(seen)

    def close(self) -> None:
        for _, process in reversed(self.running):
            process.terminate()
            process.wait(10)

    def _stop_servers(self, port: str) -> None:
        for command, process in self.running:
            if is_server(command) and port_of(command) == port:
                process.terminate()
                process.wait(10)


def stays(command: str) -> bool:
    return bool(STAYS.search(command)) and not ENDS.search(command)


def is_server(command: str) -> bool:
    return " serve " in f"{command} " or command.endswith("server.py")


def port_of(command: str) -> str:
    return (re.findall(r"--port (\d+)", command) or ["9357"])[0]


def fits(wanted: str, line: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, wanted.split("…"))), line) is not None


def write_file(text: str, terminal: Terminal) -> None:
    """Writes a block that says in its first line which file it is."""
    if found := FILE.match(text.partition("\n")[0]):
        path = terminal.folder / found[1]
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if found[2] else "w", encoding="utf-8") as file:
            file.write(terminal.translated(text))


def run_commands(text: str, terminal: Terminal) -> None:
    """Runs a block of commands and compares what they print."""
    for part in text.split("$ ")[1:]:
        command, *expected = part.rstrip("\n").split("\n")
        terminal.run(command, expected)


def with_commands() -> list[Path]:
    return [page for page in PAGES if next(blocks(page, "console"), None)]


def environment(page: Path, request: pytest.FixtureRequest) -> str:
    """The Python for a page: one with nothing but smqrt itself, when the page does not say what else to install."""
    named = "pip install" in page.read_text("utf-8")
    return sys.executable if named else str(request.getfixturevalue("clean_python"))


@pytest.mark.servers
@pytest.mark.timeout(400)  # the first one makes the environment
@pytest.mark.parametrize("page", with_commands(), ids=name)
def test_examples_of_a_page_run_in_order(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    (tmp_path / "app_preload").symlink_to(REPOSITORY / "app_preload")
    terminal = Terminal(tmp_path, environment(page, request))
    try:
        for kind, text in BLOCK.findall(page.read_text("utf-8")):
            if kind == "console":
                run_commands(text, terminal)
            else:
                write_file(text, terminal)
    finally:
        terminal.close()


def test_the_scripts_of_the_readme_are_there() -> None:
    for script in ("scripts/serve", "scripts/test"):
        assert script in (REPOSITORY / "README.md").read_text("utf-8")[:1500]
        assert os.access(REPOSITORY / script, os.X_OK)


def test_some_commands_are_shown() -> None:
    assert {"README.md", "smqrt/help/quick-start.md", "smqrt/help/application.md"} <= set(map(name, with_commands()))


# ---- links and words


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip("# ").lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, fragment = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{name(page)} links to {target}"
        if fragment:
            headings = re.findall(r"^#+ .*$", file.read_text("utf-8"), re.MULTILINE)
            assert fragment in map(anchor, headings), f"{name(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_page_names_a_place_on_one_machine(page: Path) -> None:
    assert not re.search(r"/(home|root|work|Users|tmp)/", page.read_text("utf-8"))


def test_every_page_is_linked() -> None:
    linked = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in PAGES
        for target in re.findall(r"\]\(([^)]+\.md)[#)]?", page.read_text("utf-8"))
    }
    assert [name(page) for page in HELP.rglob("*.md") if page.resolve() not in linked] == []


# ---- completeness


def page_text(page: str) -> str:
    return (HELP / f"{page}.md").read_text("utf-8")


def test_every_option_of_serve_is_documented() -> None:
    from smqrt.cli.serve import serve

    text = page_text("serving") + page_text("settings")
    shown = [one for one in serve.params if not getattr(one, "hidden", False)]  # flags of former names are hidden
    options = [option for parameter in shown for option in parameter.opts if option.startswith("-")]
    assert len(options) > 8
    assert [option for option in options if f"`{option}" not in text] == []
    assert [
        item.name for item in table() if flag(item.path) not in text or environment_name(item.path) not in text
    ] == []


def test_every_command_is_documented() -> None:
    from smqrt.cli import cli

    text = "".join(page.read_text("utf-8") for page in PAGES)
    commands = cli.list_commands(click.Context(cli))
    assert len(commands) > 5
    assert [command for command in commands if f"smqrt {command} " not in text] == []


def documented(page: str) -> list[str]:
    return re.findall(r"^### (\w+)$", page_text(page), re.MULTILINE)


def test_hub_methods_are_documented_in_one_order() -> None:
    methods = {method for method, _ in inspect.getmembers(hub.Smq, inspect.isfunction) if not method.startswith("_")}
    lua = (REPOSITORY / "smqrt/apps/lua/lib/smq/hub.lua").read_text("utf-8")
    methods |= set(re.findall(r"^function smq\.(\w+)", lua, re.MULTILINE))
    assert sorted(methods - set(documented("hub-api"))) == []
    assert sorted(set(documented("hub-api")) - methods) == ["isSMQ"]
    for entry in re.split(r"^### ", page_text("hub-api"), flags=re.MULTILINE)[1:]:
        assert re.match(r"[\w ()]+\n\n( {4}.*\n)+\n\*Context:\* ", entry), f"not in the order of the page: {entry[:60]}"


def test_every_metric_and_every_reason_is_in_its_table() -> None:
    assert set(close_log.EXPLANATIONS) == set(CloseReason)
    assert close_log.manual() in page_text("troubleshooting"), "run scripts/fix"
    assert metrics.manual() in page_text("metrics"), "run scripts/fix"
    assert limits_manual() in page_text("limits"), "run scripts/fix"


def test_every_ending_and_every_drop_is_documented() -> None:
    before_accepted = {CloseReason.REFUSED, CloseReason.CONNECT_TIMEOUT, CloseReason.BAD_CONNECT}
    words = [reason.value for reason in CloseReason if reason not in {*before_accepted, CloseReason.CLIENT_DISCONNECT}]
    text = page_text("hub-api")
    assert [word for word in words if f"`{word}`" not in text] == []
    assert [drop.name for drop in Drop if f"| `{drop.name.lower()}` |" not in page_text("data-path")] == []


def test_figures_of_the_manual_are_those_of_the_code() -> None:
    limits, shown = HttpLimits(), " ".join(page_text("http").split())
    for figure in (
        f"first byte after connecting | {limits.first_byte_s:g} s",
        f"the whole head | {limits.header_s:g} s, {limits.head_bytes >> 10} KiB, {MAX_FIELDS} fields",
        f"a pause within a body | {limits.body_idle_s:g} s",
        f"`request.body()`) | {limits.body_bytes >> 20} MiB",
        f"keep-alive | {limits.keep_alive_s:g} s",
        f"that does not read a response | {limits.send_idle_s:g} s",
        f"TLS handshake | {HANDSHAKE_S:g} s",
    ):
        assert figure in shown
    shown = " ".join(page_text("data-path").split())
    for figure in (
        f"`budget` of `create` | {outbox.DEFAULT_BUDGET_BYTES >> 20} MiB",
        f"together | {outbox.GLOBAL_BUDGET_BYTES >> 20} MiB",
        f"not one byte | {data_path.limits.stalled_s:g} s",
        f"up to {LINGER_S:g} s",
    ):
        assert figure in shown
    assert f"{MAX_PAYLOAD_BYTES:,} bytes" in page_text("protocol")


PROBE = """<?lsp
local env = setmetatable({dir = app.dir, io = app.io}, {__index = _ENV})
env.sock, env.file, env.session = ba.socket.udpcon(), app.io:open "index.lsp", request:session(true)
env.timer, env.thread = ba.timer(print), ba.thread.create()
env.mtl = require "smq.mtl".create "x"
env.channel, env.conn = env.mtl:open("x", print, print), require "smq.conn".create(env.mtl, 0, {intf = "127.0.0.1"})
env.cluster = require "smq.cluster".create(require "smq.hub".create(), env.mtl, {name = "x"})
for name, kind in request:datapairs() do
   local there
   if kind == "module" then there = pcall(require, name)
   else there = load("return " .. name:gsub("^io%.", "_G.io."):gsub(":", "."), "=", "t", env)
      local done, value = pcall(there)
      there = done and value ~= nil
   end
   print(name, there)
end ?>"""


@pytest.mark.servers
def test_the_lua_api_is_as_the_page_says(tmp_path: Path, serve: Any) -> None:
    """Every row: what is said to be there is there, what is not yet there is not."""
    (tmp_path / "index.lsp").write_text(PROBE)
    served = serve(tmp_path, "--tls-port", "0", env={"XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert served.port
    said: dict[str, bool] = {}
    kinds: list[tuple[str, str]] = []
    for names, there in re.findall(r"^\| (.*?) \| (yes|not yet) \|", page_text("lua-api"), re.MULTILINE):
        for module, value in re.findall(
            r'`require "([\w.]+)"`|`((?:ba|mako|request|response|dir|io|os|sock|file|session|timer|thread|'
            r"mtl|channel|conn|cluster)[.:][\w.]+)",
            names,
        ):
            kinds.append((module or value, "module" if module else "value"))
            said[module or value] = there == "yes"
    assert len(said) > 150
    with urlopen(f"{served.url}/?{urlencode(kinds)}") as answer:
        found = dict(line.split("\t") for line in answer.read().decode().splitlines())
    assert {key: found[key] for key, there in said.items() if found[key] != str(there).lower()} == {}


def test_every_option_of_create_is_documented() -> None:
    lua = (REPOSITORY / "smqrt/apps/lua/lib/smq/hub.lua").read_text("utf-8")
    args = (hub.create.__doc__ or "").partition("Args:")[2].partition("Raises:")[0]
    named = re.findall(r"^        (\w+(?:, \w+)*): ", args, re.MULTILINE)
    options = {option for group in named for option in group.split(", ")}
    options = options - {"options"} | set(re.findall(r"op\.(\w+)", lua[lua.index("local function options") :]))
    assert len(options) > 12
    assert [option for option in sorted(options) if f"| `{option}` |" not in page_text("hub-api")] == []


@pytest.mark.parametrize("kind", ["lua", "python"])
def test_the_examples_of_the_hub_run(kind: str, tmp_path: Path, serve: Any) -> None:
    """All of them, one behind the other, are one application."""
    prologue = 'hub = require "smq.hub"\n' if kind == "lua" else ""
    source = prologue + "\n".join(blocks(HELP / "hub-api.md", kind))
    (tmp_path / (".preload" if kind == "lua" else ".preload.py")).write_text(source, "utf-8")
    served = serve(tmp_path)
    assert served.wait_for(r"^app .* at /: (.*)$")[1] == "ok"
    assert served.port
    assert served.stop() == 0
    assert not re.search("error|traceback", served.output, re.IGNORECASE)


def test_help_prints_every_page(tmp_path: Path) -> None:
    def smqrt(*words: str) -> str:
        command = [sys.executable, "-m", "smqrt", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout

    listed = [line.split()[0] for line in smqrt("help").splitlines() if line.startswith("  ")]
    assert sorted(listed) == sorted(manual())
    assert {page.relative_to(HELP).with_suffix("").as_posix() for page in HELP.rglob("*.md")} == set(listed)
    assert smqrt("help", "hub-api") == page_text("hub-api")


# ---- pieces of Lua

ELSEWHERE = re.compile(r"example|localhost\"|onpub\b|auth = true")
"""What names a host, a function or users that only the reader has: such a piece is compiled, not run."""


def pieces(page: Path) -> list[str]:
    return [text for text in blocks(page, "lua") if not FILE.match(text.partition("\n")[0])]


PIECES = [page for page in PAGES if page.name != "hub-api.md" and pieces(page)]


@pytest.mark.servers
@pytest.mark.parametrize("page", PIECES, ids=name)
def test_pieces_of_lua_run(page: Path, tmp_path: Path, serve: Any) -> None:
    """Each in a page of its own."""
    for number, piece in enumerate(pieces(page)):
        compiled = f"<?lsp assert(load([==[{piece}]==])) print 'it ran' ?>"
        runs = f"<?lsp local function piece()\n{piece}\nend piece() print 'it ran' ?>"
        (tmp_path / f"{number}.lsp").write_text(compiled if ELSEWHERE.search(piece) else runs)
    served = serve(
        tmp_path, cwd=tmp_path, env={"XDG_CONFIG_HOME": str(tmp_path / "config")}
    )  # what they write stays there
    for file in tmp_path.glob("*.lsp"):
        file.write_text(file.read_text().replace("9357", str(served.port)))
        with urlopen(f"{served.url}/{file.name}") as answer:
            assert answer.read().decode().endswith("it ran\n"), file.read_text()
    assert "traceback" not in served.output
