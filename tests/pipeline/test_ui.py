"""Spark's own pages of a run: `status` links to them, on whatever port they are; and its figures are in /metrics.

That run ends with its driver.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.conftest import free_port
from tests.pipeline.hubs import JournalingHub
from tests.pipeline.terminal import START_S, STOP_S, Terminal, alive
from tests.support.waiting import wait_until


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    hub = JournalingHub(tmp_path / "plant")
    terminal = Terminal(tmp_path / "plant", hub.journal)
    yield terminal
    terminal.close()
    hub.stop()


def fetched(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


def listens(host: str, port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex((host, port)) == 0


@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_status_links_to_spark_on_its_actual_port_and_no_process_outlives_the_driver(terminal: Terminal) -> None:
    metrics = free_port()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        wanted = taken.getsockname()[1]
        words = ("--conf", "spark.ui.enabled=true", "--conf", f"spark.ui.port={wanted}", "--metrics", str(metrics))
        terminal.start("run", "--from", "earliest", "--republish", "--master", "local[2]", *words)
        terminal.wait_inside()
        terminal.go.touch()
        wait_until(lambda: terminal.results == [b'{"n":1}'] or terminal.ended, "the result is published", START_S)
    status = [sys.executable, "-m", "smqrt", "pipeline", "status", "--app", str(terminal.app)]
    said = subprocess.run(status, capture_output=True, text=True, check=False).stdout
    assert terminal.process
    found = re.search(rf"^Spark UI of process {terminal.process.pid}: (http://\S+)$", said, re.MULTILINE)
    assert found, said + terminal.printed
    port = urlsplit(found[1]).port
    assert port
    assert wanted < port <= wanted + 16
    assert "echo" in fetched(f"{found[1]}/StreamingQuery/")
    assert not listens("127.0.0.2", port), "nobody but this machine"
    wait_until(lambda: told(metrics)["smqrt_pipeline_rows_total", "echo"] == 1, "its figures are told", START_S)
    assert told(metrics)["smqrt_pipeline_up", "idle"] == 1
    outlived_by_nobody(terminal)


def outlived_by_nobody(terminal: Terminal) -> None:
    """kill -9 of the driver in a micro-batch, here since Spark runs already: starting it takes longer than the rest."""
    terminal.send_row()
    terminal.wait_inside()
    everybody = terminal.everybody()
    assert {"java", "python"} <= {name.rstrip(".0123456789") for name in everybody.values()}
    assert terminal.process
    terminal.process.kill()
    terminal.wait()
    terminal.go.touch()  # a worker that computes sees that nobody wants its result only when it has one
    wait_until(lambda: not any(map(alive, everybody)), "nobody is left", STOP_S)


def told(port: int) -> dict[tuple[str, str], float]:
    lines = re.findall(r'^(\w+)\{query="(\w+)"\} (\S+)$', fetched(f"http://127.0.0.1:{port}/metrics"), re.MULTILINE)
    return {(name, query): float(value) for name, query, value in lines}
