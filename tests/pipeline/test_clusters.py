"""Real clusters, whose workers have no smqrt installed: the source smq with --py-files, and `smqrt pipeline submit`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.dataset
import pyspark
import pytest

from smqrt.journal import commit, files
from smqrt.journal.record import Flag
from smqrt.pipeline import jvm
from smqrt.pipeline.status import read_all
from smqrt.pipeline.submit import pack
from tests.pipeline.conftest import needed_java
from tests.pipeline.hubs import JournalingHub
from tests.pipeline.recorded import Recorded
from tests.support.waiting import wait_until

JOB = Path(__file__).parent / "cluster_job.py"
SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"
DEPLOY = "org.apache.spark.deploy"
INSTALLED = ("pyarrow", "pandas", "numpy", "google", "protobuf", "dateutil", "python_dateutil", "pytz", "six", "tzdata")
"""pyarrow, pandas, protobuf and what they ask for."""
COMPILED = (
    "import sys; sys.pycache_prefix = None; "  # what pip has compiled
    "sys.path[:] = [path for path in sys.path if not path.endswith(('/pyspark.zip', '-src.zip'))]\n"
)
SOURCE_ROWS = 1000
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Java compiles less and starts sooner; a test that takes seconds gains nothing from the rest."""
START_S, JOB_S = 180, 800

PIPELINES = """
from pyspark.sql import functions as F

from smqrt.pipeline import publish, source, table


@source(topics="site1/#", json="device string, temp double", include_pipeline=True)  # the test publishes like one
def readings(df):
    return df


@table("readings")
def kept(readings):
    return readings.select("seq", "device", "temp")
"""
PUBLISHED = """

@publish(to="count/{device}", mode="update")
def counts(readings):
    return readings.groupBy("device").agg(F.count("*").alias("n"), F.sum("temp").alias("sum"))
"""
STATEFUL = """
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from smqrt.pipeline import alert, stateful


class Highest(StatefulProcessor):
    def init(self, handle):
        self.highest = handle.getValueState("highest", "temp double")

    def handleInputRows(self, key, rows, timerValues):
        (before,) = self.highest.get() or (-1.0,)
        temp = max([row.temp for row in rows] + [before])
        self.highest.update((temp,))
        yield Row(device=key[0], temp=temp)

    def close(self):
        pass


@publish(to="highest/{device}", mode="update")
@stateful(Highest, key="device", schema="device string, temp double")
def highest(readings):
    return readings.select("device", "temp")


@alert(to="alerts/{device}", key="device", when="temp > 98")
def hot(readings):
    return readings
"""
LARGE = """

@publish(to="large/{device}")
def large(readings):
    noise = [F.sha2(F.concat("seq", F.lit(part)), 512) for part in "abcdefghijklmnop"]  # which can't be compressed
    return readings.select("device", "temp", F.concat(*noise).alias("text"))
"""
SMALL = ("--conf", "spark.executor.memory=512m", "--conf", "spark.ui.enabled=false")
SMALL += ("--conf", "spark.sql.shuffle.partitions=2")
ROWS = 300


pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def workers_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with what the manual asks for on workers, without smqrt and pyspark: Spark brings the latter."""
    return make_python(tmp_path_factory.mktemp("worker"), INSTALLED)


@pytest.fixture(scope="module")
def quick_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a compiled pyspark: from Spark's archive each of some forty processes would compile it anew."""
    python = make_python(tmp_path_factory.mktemp("quick"), (*INSTALLED, "pyspark", "py4j"))
    (site_of(python) / "quick.pth").write_text(COMPILED)
    return python


def make_python(folder: Path, installed: tuple[str, ...]) -> Path:
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv" / "bin" / "python"
    for path in Path(pyarrow.__file__).parent.parent.iterdir():
        if path.name.startswith(installed) and not path.name.startswith("pyspark_smq"):
            (site_of(python) / path.name).symlink_to(path)
    assert subprocess.run([python, "-c", "import smqrt"], capture_output=True, cwd=folder, check=False).returncode == 1
    return python


def site_of(python: Path) -> Path:
    return next(python.parent.parent.glob("lib/python*/site-packages"))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    (folder / "pipelines").mkdir()
    return pack(folder / "smqrt.zip", folder / "pipelines")


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return Recorded(tmp_path / "journal").add(SOURCE_ROWS).seal().path


@pytest.fixture(scope="module")
def standalone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A master and two workers on loopback, as processes; gives the master's address."""
    needed_java()
    folder = tmp_path_factory.mktemp("standalone")
    running = [start(folder, "master", "--port", "0", "--webui-port", "0")]
    try:
        address = announced(folder / "master.log", r"Starting Spark master at (spark://\S+)")
        for number in (1, 2):
            options = ["--cores", "1", "--memory", "600m", "--webui-port", "0", "-d", str(folder / f"work{number}")]
            running.append(start(folder, f"worker{number}", *options, address))
        for number in (1, 2):
            announced(folder / f"worker{number}.log", "(Successfully registered with master)")
        yield address
    finally:
        for process in running:
            process.kill()
            process.wait()


def start(folder: Path, name: str, *arguments: str) -> subprocess.Popen[bytes]:
    kind = name.rstrip("12")
    command = [str(SPARK_CLASS), f"{DEPLOY}.{kind}.{kind.title()}", "--host", "127.0.0.1", *arguments]
    environment = bare() | {"SPARK_DAEMON_MEMORY": "128m", "SPARK_LOCAL_DIRS": str(folder)}
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)


def bare() -> dict[str, str]:
    """The environment without what this run of the tests put into it; each Java of the cluster starts quickly."""
    names = ("PYTHONPATH", "PYSPARK_PYTHON", "SPARK_HOME")
    java = " ".join([QUICK, *jvm.archive_options(jvm.find_java())])
    own = {"SPARK_LOCAL_IP": "127.0.0.1", "JAVA_TOOL_OPTIONS": java}
    return {name: value for name, value in os.environ.items() if name not in names} | own


def announced(log: Path, pattern: str) -> str:
    match = wait_until(lambda: re.search(pattern, log.read_text()), f"{pattern} in {log}", START_S)
    assert match
    return match[1]


def run(master: str, python: Path, package: Path, journal: Path, folder: Path) -> dict[str, Any]:
    command = [sys.executable, str(JOB), master, str(package), str(journal), str(folder / "checkpoint")]
    environment = bare() | {"PYSPARK_PYTHON": str(python)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=JOB_S, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check(found: dict[str, Any], package: Path) -> None:
    assert found["sum"] == sum(range(SOURCE_ROWS))
    assert found["tasks"] == 10
    assert found["batches"] == [400, 400, 200]
    assert all(package.name in place for place in found["from"]), found["from"]


def test_a_master_and_two_workers(
    standalone: str, workers_python: Path, package: Path, journal: Path, tmp_path: Path
) -> None:
    check(run(standalone, workers_python, package, journal, tmp_path), package)


# ---- smqrt pipeline submit


def make(app: Path, text: str) -> None:
    (app / "pipelines").mkdir(parents=True)
    (app / "pipelines" / "readings.py").write_text(text)


def submit(app: Path, master: str, python: Path, *words: str, spark: tuple[str, ...] = ()) -> None:
    command = [sys.executable, "-m", "smqrt", "pipeline", "submit", "--app", str(app), "--master", master]
    command += ["--python", str(python), "--from", "earliest", "--once", *words, "--", *SMALL, *spark]
    # Not where the tests run: Python looks for modules there first, and would find smqrt.
    ran = subprocess.run(command, cwd=app.parent, capture_output=True, text=True, env=bare(), timeout=800, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert {status.state for status in read_all(app / ".pipelines")} == {"finished"}


def publish(hub: JournalingHub, device: str) -> None:
    rows = [(b"site1/x", None, b'{"device": "%s", "temp": %d}' % (device.encode(), n)) for n in range(ROWS // 3)]
    commit.publish(files.HubAddress.of(hub.journal), rows)


def table(app: Path) -> list[int]:
    return sorted(pyarrow.dataset.dataset(app / ".tables/readings", format="parquet").to_table()["seq"].to_pylist())


def test_over_http_on_a_master_and_two_workers(standalone: str, quick_python: Path, tmp_path: Path) -> None:
    """Workers read from the hub with its token; the driver's results come back to it, each once."""
    hub = JournalingHub(tmp_path / "hub")
    try:
        for device in range(3):
            publish(hub, f"d{device}")
        app = tmp_path / "app"
        make(app, PIPELINES + PUBLISHED + STATEFUL)
        told = hub.announced
        submit(app, standalone, quick_python, "--republish", "--journal", told["url"], "--token", told["token"])
        results, highest, alerts = hub.rows("count/#"), hub.rows("highest/#"), hub.rows("alerts/#")
    finally:
        hub.stop()
    assert table(app) == list(range(ROWS))
    assert sorted((row.topic, row.payload) for row in results) == [
        (f"count/d{device}", b'{"device":"d%d","n":100,"sum":4950.0}' % device) for device in range(3)
    ]
    assert all(row.flags & Flag.PIPELINE for row in results)
    assert len({row.txn for row in results}) == 1
    assert sorted((row.topic, json.loads(row.payload)["temp"]) for row in highest) == [
        (f"highest/d{device}", 99.0) for device in range(3)
    ]
    assert sorted((row.topic, json.loads(row.payload)["state"]) for row in alerts) == [
        (f"alerts/d{device}", "raised") for device in range(3)
    ]


def test_a_shared_folder_on_a_local_cluster(quick_python: Path, tmp_path: Path) -> None:
    """Results that are too large for the driver go from a worker to the hub that the folder names."""
    hub = JournalingHub(tmp_path / "app")
    try:
        publish(hub, "d0")
        make(tmp_path / "app", PIPELINES + LARGE)
        small = ("--conf", "spark.driver.maxResultSize=50k")
        submit(tmp_path / "app", "local-cluster[1,1,1024]", quick_python, "--republish", "kept", "large", spark=small)
        results = hub.rows("large/#")
    finally:
        hub.stop()
    assert "spark.driver.maxResultSize" in (tmp_path / "app/.pipelines/.spark/spark.log").read_text()
    assert table(tmp_path / "app") == list(range(ROWS // 3))
    assert sorted(json.loads(row.payload)["temp"] for row in results) == list(range(ROWS // 3))
