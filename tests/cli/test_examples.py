"""The examples of every `--help` run as they stand, in a folder that has what they name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from smqrt.cli import cli
from tests.clients.mqtt.mosquitto import Mosquitto
from tests.conftest import Served

pytestmark = pytest.mark.servers

FINISHES_S = 40
STAYS = re.compile(r"smqrt serve|smqrt sub (?!.*--count)|--follow|--watch")
ASKS = re.compile(r"smqrt passwd (?!.*(--stdin|--delete))")
EXAMPLE = re.compile(r"^ +((?:smqrt|tail) [^\n]*?)(?:   +.*)?$", re.MULTILINE)
APPLICATION = """
from smqrt import hub

smq = hub.create(journal=True)
smq.subscribe("weather", onmsg=lambda data, ptid, tid, subtid: smq.publish(b"sunny", ptid, subtid))


def connect(request, relpath):
    if relpath != "smq":
        return False
    smq.connect(request)
    return True


dir.setfunc(connect)
"""


def examples(command: click.Command, name: str) -> Iterator[str]:
    context = click.Context(command, info_name=name, terminal_width=200)
    yield from EXAMPLE.findall(command.get_help(context))
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            assert found
            yield from examples(found, child)


EXAMPLES = list(examples(cli, "smqrt"))


class World:
    """A folder, a server with the hubs `chat` and `plant` and an application in Lua, a mosquitto."""

    def __init__(self, folder: Path, mosquitto: Mosquitto) -> None:
        self.folder = folder
        self._broker = mosquitto.address
        for name in ("chat", "plant", "site", "api"):
            (folder / name).mkdir()
            (folder / name / "index.html").write_text(name)
        for name in ("chat", "plant"):
            (folder / name / ".preload.py").write_text(APPLICATION)
        (folder / "shop").mkdir()
        (folder / "shop" / ".preload").write_text("prices = {apple = 3}")
        (folder / "picture.jpg").write_bytes(bytes(range(256)))
        (folder / "log").write_text("one\ntwo\n")
        subprocess.run([sys.executable, "-m", "zipfile", "-c", "led.zip", "site"], cwd=folder, check=True)
        self.free = folder / "free"  # the same applications, which nobody serves yet
        shutil.copytree(folder, self.free)
        self.served = Served(folder / "chat", folder / "plant", folder / "shop", "--admin-lua-prompt")
        self.env = os.environ | {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "SMQRT_PORT": "0",
            "XDG_CACHE_HOME": str(folder / "cache"),
            "PYTHONUNBUFFERED": "1",
        }
        rows = "".join(f'{{"device": "d{number % 3}", "temp": {number / 2}}}\n' for number in range(30))
        (folder / "rows").write_text(rows)
        self.run("tail -n 30 rows | smqrt pub http://localhost:9357/plant/ site1/temp")

    def start(self, line: str) -> subprocess.Popen[str]:
        line = line.replace("localhost:9357", f"127.0.0.1:{self.served.port}").replace("//test:", "//127.0.0.1:")
        line = line.replace(":9357", f":{self.served.port}").replace("mqtt://localhost", f"mqtt://{self._broker}")
        line = line.replace("--tls-port 9443", "--tls-port 0")
        line = line.replace("smqrt lua shop", f"smqrt lua shop --pid {self.served.process.pid}")  # among other tests
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        start = "exec " if line.startswith("smqrt") else ""
        cwd = self.free if line.startswith("smqrt serve") else self.folder
        return subprocess.Popen(["bash", "-c", f"set -o pipefail; {start}{line}"], cwd=cwd, env=self.env, **pipe)

    def run(self, line: str) -> None:
        output, _ = (process := self.start(line)).communicate(timeout=FINISHES_S)
        assert process.returncode == 0, f"{line}: exit code {process.returncode}\n{output}"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    broker = Mosquitto(tmp_path_factory.mktemp("mosquitto"))
    made = World(tmp_path_factory.mktemp("world"), broker)
    yield made
    made.served.stop()
    broker.stop()


def test_there_are_examples() -> None:
    words = {line.split()[1] for line in EXAMPLES if line.startswith("smqrt")}
    assert {"serve", "pub", "sub", "request", "journal"} <= words


@pytest.mark.parametrize("line", EXAMPLES)
def test_an_example_runs(world: World, line: str) -> None:
    if "--count" in line:
        _with_messages(world, line)
    elif STAYS.search(line):
        _stays(world, line)
    elif ASKS.search(line):
        world.run(f"printf 'secret\\n' | {line} --stdin")  # there is no terminal here
    else:
        world.run(line)


def _with_messages(world: World, line: str) -> None:
    """`sub` ends when a message has come; it may subscribe a little late."""
    process = world.start(line)
    while process.poll() is None:
        world.run("smqrt pub http://localhost:9357/chat/ say hello")
    assert process.communicate()[0].endswith('"payload": "hello"}\n')
    assert process.returncode == 0


def _stays(world: World, line: str) -> None:
    process = world.start(line)
    try:
        time.sleep(1.5)  # nothing tells that it will go on for ever
        assert process.poll() is None, f"{line} ended:\n{process.communicate()[0]}"
    finally:
        process.terminate()
    output, _ = process.communicate(timeout=FINISHES_S)
    assert "Traceback" not in output
    assert "Error" not in output
