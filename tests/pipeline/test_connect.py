"""help/declarative-pipelines.md: its files, with a real server of Spark Connect, `spark-pipelines` and a real hub."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from smqrt.errors import PipelineError
from smqrt.journal import commit, files
from smqrt.pipeline import session
from tests.conftest import REPOSITORY, free_port
from tests.pipeline.conftest import CONF, HELPERS_PATH, needed_java, quick_java
from tests.pipeline.hubs import JournalingHub
from tests.support.waiting import wait_until

PAGE = (REPOSITORY / "smqrt/help/declarative-pipelines.md").read_text("utf-8")
FILES = dict(re.findall(r"^```\w+\n# (\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"
START_S, RUN_S = 200, 280
ASKS = """
from smqrt.errors import PipelineError
from smqrt.pipeline import tables

try:
    tables.frame(spark, "s3a://bucket/readings")
except PipelineError as error:
    print(error)
spark.stop()
"""


@dataclass
class Place:
    """What stands for /srv: the application `plant` with its hub, and a server of Spark Connect."""

    folder: Path
    hub: JournalingHub
    remote: str
    environment: dict[str, str]

    def write(self) -> None:
        """Make the files of the page."""
        for name, text in FILES.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace("/srv/", f"{self.folder}/").replace("sc://localhost:15002", self.remote))

    def run(self, *command: str, folder: str = ".") -> str:
        options: dict[str, Any] = {"capture_output": True, "text": True, "check": False, "timeout": RUN_S}
        done = subprocess.run(command, cwd=self.folder / folder, env=self.environment, **options)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def send(self, *payloads: Any) -> None:
        rows = [(b"site1/" + each["device"].encode(), None, json.dumps(each).encode()) for each in payloads]
        commit.publish(files.HubAddress.of(self.hub.journal), rows)

    def published(self, topic: str) -> list[tuple[str, bytes]]:
        return sorted((row.topic, bytes(row.payload)) for row in self.hub.rows(topic))


def listening(port: int) -> bool:
    import socket

    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    needed_java()
    import pyspark

    folder, port = tmp_path_factory.mktemp("srv"), free_port()
    home = Path(pyspark.__file__).parent
    environment = os.environ | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYTHONPATH": HELPERS_PATH,
    }
    conf = CONF | {"spark.connect.grpc.binding.port": str(port), "spark.connect.grpc.binding.address": "127.0.0.1"}
    conf["spark.driver.extraJavaOptions"] = quick_java()
    settings = [word for name, value in conf.items() for word in ("--conf", f"{name}={value}")]
    submit = [
        str(home / "bin" / "spark-submit"),
        "--master",
        "local[2]",
        "--class",
        SERVER,
        *settings,
        "spark-internal",
    ]
    log = folder / "server.log"
    hub = JournalingHub(folder / "plant")
    with log.open("w") as output:
        server = subprocess.Popen(
            submit, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            wait_until(lambda: listening(port) or server.poll() is not None, "the server listens", START_S)
            assert server.poll() is None, log.read_text()
            yield Place(folder, hub, f"sc://127.0.0.1:{port}", environment)
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(30)
            hub.stop()


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_a_program_of_spark_connect_reads_and_publishes(place: Place) -> None:
    place.write()
    place.send({"device": "d1", "temp": 20}, {"device": "d2", "temp": 30})
    program = place.folder / "connect.py"
    program.write_text(program.read_text().replace("spark.stop()", ASKS))
    told = place.run(sys.executable, "connect.py")
    assert "2 readings" in told
    assert "this session uses Spark Connect: create a session with" in told
    copies = [("copy/site1/d1", b'{"device": "d1", "temp": 20}'), ("copy/site1/d2", b'{"device": "d2", "temp": 30}')]
    wait_until(lambda: place.published("copy/#") == copies, "the stream's rows are published", 30)
    wait_until(lambda: place.published("site2/#") == [("site2/d9", b"hello")], "the batch is published", 30)


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_a_declarative_pipeline_publishes_each_message_once(place: Place) -> None:
    shutil.rmtree(place.folder / "factory", ignore_errors=True)
    place.write()
    place.send({"device": "d1", "temp": 85.5}, {"device": "d1", "temp": 20.0})
    command = ("spark-pipelines", "run", "--remote", place.remote)
    told = place.run(*command, folder="factory")
    for flow in ("spark_catalog.default.readings", "hot", "spark_catalog.default.devices"):
        assert f"Flow {flow} has COMPLETED." in told
    first = ("hot/d1", b'{"device":"d1","temp":85.5}')
    wait_until(lambda: place.published("hot/#") == [first], "what is hot is published", 30)
    place.send({"device": "d3", "temp": 99.0})
    assert "Run is COMPLETED." in place.run(*command, folder="factory")
    second = ("hot/d3", b'{"device":"d3","temp":99.0}')
    wait_until(lambda: place.published("hot/#") == [first, second], "what is new is, and nothing again", 30)


def test_pipelines_report_their_own_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PipelineError, match="sc://there is a Spark Connect server, which can't run pipelines"):
        session.start_spark("sc://there", "test", tmp_path)
    monkeypatch.setenv("SPARK_REMOTE", "sc://here")
    with pytest.raises(PipelineError, match="sc://here is a Spark Connect server.*unset SPARK_REMOTE"):
        session.start_spark("local[2]", "test", tmp_path)
