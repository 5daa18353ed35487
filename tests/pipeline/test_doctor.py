"""`smqrt pipeline doctor`: each finding, on a machine that lacks the thing."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from smqrt.pipeline import doctor
from smqrt.pipeline.doctor import Check, DoctorOptions, examine
from tests.pipeline.java import INSTALL, fake

EXTRA = "pip install 'smqrt[spark]'"


def found(place: DoctorOptions) -> dict[str, Check]:
    return {check.name: check for check in examine(place)}


@pytest.fixture
def place(tmp_path: Path) -> DoctorOptions:
    """An application without anything; Spark stays out of these tests."""
    (tmp_path / "app").mkdir()
    return DoctorOptions(tmp_path / "app", tmp_path / "app/.pipelines", str(tmp_path / "app/.journal"), spark=False)


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in front of the path for distributions that aren't there."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    return folder


def install(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


# ---- Java


def test_the_path_is_empty(place: DoctorOptions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(doctor.jvm.find_java, "__defaults__", (None, tmp_path))
    check = found(place)["java"]
    assert check == Check("java", False, "Java 17 or 21 is needed. Run as root", INSTALL)


def test_java_home_is_wrong(place: DoctorOptions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    check = found(place)["java"]
    assert not check.ok
    assert check.detail == f"JAVA_HOME is {tmp_path}, which has no bin/java"
    assert check.remedy == "unset it, or set it to Java 17 or 21."


def test_java_11(place: DoctorOptions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(fake(tmp_path / "eleven", "11.0.21").parent))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(doctor.jvm.find_java, "__defaults__", (None, tmp_path))
    check = found(place)["java"]
    assert (check.ok, check.remedy) == (False, INSTALL)
    assert "found only Java 11.0.21" in check.detail


# ---- packages


@pytest.mark.parametrize("version", ["4.1.2", "3.5.9", "5.0.0", "10.1"])
def test_another_pyspark(place: DoctorOptions, distribution: Path, version: str) -> None:
    install(distribution, "pyspark", version)
    check = found(place)["pyspark"]
    assert check == Check("pyspark", False, f"version {version}, but 4.2 or newer, before 5 is needed", EXTRA)


@pytest.mark.parametrize("version", ["4.2.0", "4.10.0.dev1"])
def test_pysparks_that_fit(distribution: Path, version: str) -> None:
    install(distribution, "pyspark", version)
    assert doctor.package("pyspark", *doctor.PYSPARK) == Check("pyspark", True, f"version {version}")


def test_an_old_pyarrow(place: DoctorOptions, distribution: Path) -> None:
    install(distribution, "pyarrow", "17.0.0")
    assert found(place)["pyarrow"] == Check("pyarrow", False, "version 17.0.0, but 18 or newer is needed", EXTRA)


def test_nothing_is_installed() -> None:
    assert doctor.package("smqrt-nowhere", (1,)) == Check("smqrt-nowhere", False, "not installed", EXTRA)


# ---- the machine


def test_memory_runs_out(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       32000000 kB\nMemAvailable:   1048576 kB\n")
    check = doctor.memory(meminfo, tmp_path)
    assert (check.ok, check.detail) == (False, "1.0 GB available")
    assert check.remedy.startswith("1.5 GB are needed: ")
    meminfo.write_text("MemAvailable:   4194304 kB\n")
    assert doctor.memory(meminfo, tmp_path) == Check("memory", True, "4.0 GB available")


def test_the_container_allows_less(tmp_path: Path) -> None:
    (meminfo := tmp_path / "meminfo").write_text("MemAvailable:   4194304 kB\n")
    (tmp_path / "memory.current").write_text(f"{3 << 30}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {1 << 30}\n")
    (tmp_path / "memory.max").write_text(f"{3 << 30}\n")
    assert doctor.memory(meminfo, tmp_path).detail == "1.0 GB available"
    (tmp_path / "memory.max").write_text("max\n")
    assert doctor.memory(meminfo, tmp_path).detail == "4.0 GB available"


def test_the_disk_is_full(tmp_path: Path) -> None:
    check = doctor.disk(tmp_path / "not/yet/there", 1 << 60)
    assert not check.ok
    assert check.detail.endswith(f" free in {tmp_path}")
    assert check.remedy.startswith("1,073,741,824.0 GB are needed: free some space")


def test_the_state_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check = doctor.writable(tmp_path / "file" / "state")
    assert check.detail == f"{tmp_path}/file/state can't be written: Not a directory"
    assert check.remedy == f"give user {os.getuid()} write access"


def test_nothing_runs_from_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.executable(tmp_path) == Check("temp", True, str(tmp_path))
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC | os.ST_NOSUID))
    remedy = "set TMPDIR to a folder that is not"
    assert doctor.executable(tmp_path) == Check("temp", False, f"{tmp_path} is mounted noexec", remedy)


# ---- the application


def test_an_application_without_anything(place: DoctorOptions) -> None:
    checks = found(place)
    assert not checks["journal"].ok
    assert "is not the folder of a journal" in checks["journal"].detail
    assert checks["journal"].remedy.startswith("create the hub with journal=True")
    assert checks["hub"].detail == "" or not checks["hub"].ok
    assert not checks["pipelines"].ok
    assert "smqrt pipeline init" in checks["pipelines"].detail + checks["pipelines"].remedy
    assert "spark" not in checks


def test_a_pipeline_that_cannot_be_read(place: DoctorOptions) -> None:
    (place.app / "pipelines").mkdir()
    assert found(place)["pipelines"].remedy == "smqrt pipeline init NAME"
    (place.app / "pipelines" / "broken.py").write_text("from smqrt.pipeline import sauce\n")
    check = found(place)["pipelines"]
    assert not check.ok
    assert "broken.py:1" in check.detail + check.remedy


def test_a_hub_without_a_server(place: DoctorOptions) -> None:
    url = "http://127.0.0.1:9/rtl/journal/app"
    checks = found(DoctorOptions(place.app, place.state, url, "a token of sixteen", spark=False))
    assert not checks["hub"].ok
    assert "127.0.0.1:9" in checks["hub"].detail + checks["hub"].remedy
    checks = found(DoctorOptions(place.app, place.state, url, None, spark=False))
    assert "needs a token" in checks["hub"].detail + checks["hub"].remedy


# ---- Spark

GOOD_AND_BAD = """
from smqrt.pipeline import publish, source, table

@source("#", json="device string, temp double")
def readings(rows):
    return rows

@publish(to="mean/{device}", mode="update")
def means(readings):
    return readings.groupBy("device").avg("temp")

@publish(to="mean/{gadget}", mode="update")
def no_such_topic(readings):
    return readings.groupBy("device").avg("temp")

@table("silver", partition_by=["site"])
def no_such_folder(readings):
    return readings

@table("lake", format="delta")
def no_library(readings):
    return readings

@publish(to="mean/{device}")
def never_final(readings):
    return readings.groupBy("device").avg("temp")

@publish(to="mean/{device}")
def no_such_column(readings):
    return readings.select("devise")
"""


def test_spark_plans_each_query(place: DoctorOptions, spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deltalake", None)
    (place.app / "pipelines").mkdir()
    (place.app / "pipelines" / "plant.py").write_text(GOOD_AND_BAD)
    checks = {check.name: check for check in doctor.check_plans(place, spark)}
    assert checks.pop("means") == Check("means", True, "can be run: device, avg(temp)")
    said = {name: f"{check.detail}: {check.remedy}" for name, check in checks.items() if not check.ok}
    assert "has no column 'gadget'" in said["no_such_topic"]
    assert "partitioned by 'site'" in said["no_such_folder"]
    assert "Delta tables need deltalake" in said["no_library"]
    assert "without a watermark" in said["never_final"]
    assert "`devise` cannot be resolved" in said["no_such_column"]
