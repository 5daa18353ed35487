"""One Spark for all tests of pipelines: starting it takes longer than most of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from smqrt.pipeline import jvm, session
from tests.pipeline.applications import Application
from tests.pipeline.hubs import JournalingHub
from tests.support.spark_python import spark_python

HERE = Path(__file__).parent
# With its first compiler only, Java has a code cache of 48 MB, removes code and compiles it again: a tenth of the CPU
# time.
JVM = (
    "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:+UseSerialGC -Xshare:auto -Duser.timezone=UTC "
    f"-Dlog4j2.configurationFile={HERE / 'log4j2.properties'}"
)
CONF = (
    session.COMMON_SETTINGS
    | session.LOCAL_SETTINGS
    | {"spark.driver.memory": "1g", "spark.driver.extraJavaOptions": JVM}
)
"""As pipelines have it on one machine, with a quick start; what a test needs besides, it sets and unsets itself."""
HELPERS_PATH = os.pathsep.join(
    [str(HERE.parent.parent / "smqrt" / "pipeline" / "helper"), os.environ.get("PYTHONPATH", "")]
)
"""Spark's helpers take the compiled pyspark, as they do in `smqrt pipeline run`."""


def quick_java() -> str:
    """Options for the Java of a driver, with the archive from which it starts sooner."""
    return " ".join([JVM, *jvm.archive_options(jvm.find_java())])


def needed_java() -> None:
    """Fails where Java is missing: Spark tests never skip."""
    home = os.environ.get("JAVA_HOME")
    assert shutil.which("java") or (home and Path(home, "bin/java").exists()), (
        "the Spark tests need Java 17 or 21; scripts/test installs it, or: apt-get install openjdk-17-jre-headless"
    )


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The SparkSession of the whole run: `local[2]`, UTC, one shuffle partition, quiet."""
    needed_java()
    folder = tmp_path_factory.mktemp("spark")
    with spark_python(tmp_path_factory.mktemp("python"), HELPERS_PATH) as python:
        os.environ.update(PYSPARK_PYTHON=str(python), SPARK_LOCAL_IP="127.0.0.1", PYTHONPATH=HELPERS_PATH)
        started = start_spark(folder)
        yield started
        started.stop()


def start_spark(folder: Path) -> Any:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").appName("smqrt tests")
    for name, value in (CONF | {"spark.driver.extraJavaOptions": quick_java()}).items():
        builder = builder.config(name, value)
    builder = builder.config("spark.sql.warehouse.dir", str(folder / "warehouse"))
    started = builder.config("spark.local.dir", str(folder)).getOrCreate()
    jvm.keep_classes()  # as `smqrt.pipeline.session.start_spark`
    return started


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JournalingHub]:
    """A hub for all tests of a file; each has topics of its own."""
    running = JournalingHub(tmp_path_factory.mktemp("hub") / "app")
    yield running
    running.stop()


@pytest.fixture
def app(tmp_path: Path, hub: JournalingHub, spark: Any) -> Application:
    """An application beside that hub."""
    return Application(tmp_path, hub, spark)
