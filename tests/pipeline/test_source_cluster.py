"""The source smq on clusters whose workers have no smqrt installed: they get it with --py-files."""

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
import pyspark
import pytest

from smqrt.pipeline import jvm
from smqrt.pipeline.submit import pack
from tests.pipeline.conftest import needed_java
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
ROWS = 1000
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Java compiles less and starts sooner; a test that takes seconds gains nothing from the rest."""
START_S, JOB_S = 180, 800

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
    return Recorded(tmp_path / "journal").add(ROWS).seal().path


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
    assert found["sum"] == sum(range(ROWS))
    assert found["tasks"] == 10
    assert found["batches"] == [400, 400, 200]
    assert all(package.name in place for place in found["from"]), found["from"]


def test_a_master_and_two_workers(
    standalone: str, workers_python: Path, package: Path, journal: Path, tmp_path: Path
) -> None:
    check(run(standalone, workers_python, package, journal, tmp_path), package)
