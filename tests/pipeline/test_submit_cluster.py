"""`smqrt pipeline submit` on real clusters, whose workers have no smqrt."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.dataset
import pytest

from smqrt.journal import commit, files
from smqrt.journal.record import Flag
from smqrt.pipeline.status import read_all
from tests.pipeline.hubs import JournalingHub
from tests.pipeline.test_source_cluster import bare, quick_python, standalone

__all__ = ["standalone", "quick_python"]  # fixtures

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

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
        submit(tmp_path / "app", "local-cluster[2,1,1024]", quick_python, "--republish", "kept", "large", spark=small)
        results = hub.rows("large/#")
    finally:
        hub.stop()
    assert "spark.driver.maxResultSize" in (tmp_path / "app/.pipelines/.spark/spark.log").read_text()
    assert table(tmp_path / "app") == list(range(ROWS // 3))
    assert sorted(json.loads(row.payload)["temp"] for row in results) == list(range(ROWS // 3))
