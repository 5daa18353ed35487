"""The commonest mistakes of new users get the sentences that the page Troubleshooting shows, with the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gevent
import pytest
import trustme
from click.testing import CliRunner

from smqrt import hub
from smqrt.apps.lua.vm import Vm
from smqrt.apps.lua.watchdog import LoopWatchdog
from smqrt.cli import cli
from smqrt.cli.serve import discover
from smqrt.client import SmqClient
from smqrt.errors import StartError
from smqrt.hub import Refused
from smqrt.mqtt import MqttClient
from smqrt.transport.listener import Listener
from tests.apps.lua.lua_hub import LuaSite, lua
from tests.conftest import REPOSITORY
from tests.support.factory import Factory
from tests.support.local_broker import LocalBroker
from tests.support.pki import server_of

__all__ = ["lua"]  # a fixture

PAGE = (REPOSITORY / "smqrt/help/troubleshooting.md").read_text("utf-8")
SECTION = PAGE.partition("## Common mistakes\n")[2].partition("\n## ")[0]
ROWS = dict(re.findall(r"^\| ([^|`]+) \| `([^|]+)` \|", SECTION, re.MULTILINE))
"""Sentence by mistake; `…` stands for any text."""

Start = Callable[..., LocalBroker]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a broker in this process: `start(context=..., authenticate=...)`."""
    with Factory(LocalBroker) as make:
        yield make


def command(*words: str) -> str:
    """Return the error of a command of `smqrt`."""
    result = CliRunner().invoke(cli, [*words], prog_name="smqrt")
    assert result.exit_code, result.output
    return result.stderr.strip().splitlines()[-1].removeprefix("Error: ")


def error(kind: type[Exception], call: Callable[..., object], *arguments: Any, **keywords: Any) -> str:
    """Return the text of the exception that a call raises."""
    with pytest.raises(kind) as raised:
        call(*arguments, **keywords)
    return str(raised.value)


def expect(mistake: str, text: str) -> None:
    """Check that a text is the sentence of a mistake."""
    pattern = ".*".join(map(re.escape, ROWS[mistake].split("…")))
    assert re.fullmatch(pattern, text), f"{mistake}: the page shows {ROWS[mistake]!r}, it is {text!r}"


def test_the_page_has_the_mistakes_of_this_file() -> None:
    here = Path(__file__).read_text("utf-8")
    assert len(ROWS) >= 10
    assert [mistake for mistake in ROWS if f'expect("{mistake}", ' not in here] == []


def test_commands_and_folders(tmp_path: Path) -> None:
    expect("misspelled command", command("serv", "chat"))
    expect("wrong folder", error(StartError, discover, ["caht"], [], tmp_path))
    expect("folder without an application", error(StartError, discover, [], [], tmp_path))


def test_a_port_in_use() -> None:
    with Factory(Listener) as listen:
        first = listen("127.0.0.1", 0, print)
        first.start()
        expect("port in use", error(StartError, listen, "127.0.0.1", first.address[1], print))


def test_misspelled_settings(tmp_path: Path) -> None:
    (tmp_path / "smqrt.toml").write_text("prot = 80\n")
    expect("misspelled setting", command("config", "check", str(tmp_path / "smqrt.toml")).rpartition("/")[2])
    expect("misspelled option of a command", command("pub", "--qso", "1", "mqtt://localhost", "t", "x"))


def test_misspelled_options_in_python(caplog: pytest.LogCaptureFixture) -> None:
    expect("misspelled option of a hub", error(TypeError, hub.create, onmesg=print))
    smq = hub.create()
    expected = "onmesg is not an option; did you mean onmsg?"
    assert expected in error(TypeError, smq.subscribe, "t", onmesg=print)
    smq.subscribe("t", {"onmesg": print})
    assert "smq.subscribe has no option 'onmesg'; it is ignored; did you mean 'onmsg'?" in caplog.text
    expect("misspelled option of a client", error(Exception, SmqClient, "http://localhost/", cafil="ca.pem"))
    assert "usernam is not an option; did you mean username?" in error(Exception, MqttClient, "x", usernam="a")


def test_misspelled_options_in_lua(lua: Callable[[str], LuaSite], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    lua("smq = require'smq.hub'.create{onmesg = print, [5] = 6, unlike = 7}\nsmq:subscribe('t', {onmesg = print})")
    lines = [line.partition(".preload:1: ")[2] for line in caplog.messages]
    expect("misspelled option in Lua", next(line for line in lines if "onmesg" in line))
    assert "smq.hub has no option 'unlike'; it is ignored" in lines
    assert "smq.hub has no option '5'; it is ignored" in lines
    assert "2: smq.subscribe has no option 'onmesg'; it is ignored; did you mean 'onmsg'?" in caplog.text


def test_a_page_that_does_not_connect_clients(start: Start) -> None:
    expect("page without smq:connect", command("pub", start().url.replace("smq.lsp", "index.lsp"), "t", "x"))


def test_no_server() -> None:
    expect("no server at the address", command("pub", "http://127.0.0.1:1/", "t", "x"))


def test_tls(start: Start) -> None:
    secure = start(context=server_of(trustme.CA().issue_cert("127.0.0.1")).context())
    expect("untrusted certificate", command("pub", secure.url, "t", "x"))
    expect("http instead of https", command("pub", secure.url.replace("https", "http"), "t", "x"))
    expect("https instead of http", command("pub", start().url.replace("http", "https"), "t", "x"))


def test_a_missing_password(start: Start) -> None:
    def authenticate(credentials: bytes, info: hub.Info) -> int:
        raise Refused(3, "no password")

    expect("missing password", command("pub", start(authenticate=authenticate).url, "t", "x"))


def test_a_topic_that_is_no_text() -> None:
    expect("topic that is not text", error(Exception, hub.create().publish, "x", ["house", "lamp"]))


def test_a_handler_that_blocks() -> None:
    vm, seen = Vm(), list[str]()
    watchdog = LoopWatchdog(vm, 0.1, lambda text: seen.append(text.decode()))
    watchdog.start()
    gevent.sleep(0.1)
    vm.run(vm.compile("local stop = os.clock() + 0.5 while os.clock() < stop do end"))
    watchdog.stop()
    vm.stop()
    expect("blocking call in a handler", seen[0].partition("\n")[0])
