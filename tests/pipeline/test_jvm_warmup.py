"""The archive of Spark's classes: when it is taken, and that Java takes it."""

from __future__ import annotations

import os
import re
import subprocess
from importlib import util
from pathlib import Path

import pytest

from smqrt.errors import PipelineError
from smqrt.pipeline import jvm

JAVA = jvm.Java(Path("/usr/lib/jvm/java-17/bin/java"), "17.0.15", 17)


@pytest.fixture
def spark_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for Spark's, with one jar; and a cache folder of its own."""
    home = tmp_path / "spark"
    (home / "jars").mkdir(parents=True)
    (home / "jars" / "spark.jar").write_bytes(b"one")
    monkeypatch.setenv("SPARK_HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return home


def made(size_bytes: int = 2 << 20) -> Path:
    path = jvm.archive(JAVA)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size_bytes))
    return path


def test_the_archive_is_in_the_cache_folder(spark_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert jvm.archive(JAVA).parent == spark_home.parent / "cache" / "smqrt"
    assert jvm.archive(JAVA).name.startswith("spark-4.")
    assert "-java-17-" in jvm.archive(JAVA).name
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert jvm.archive(JAVA).parent == Path("/home/somebody/.cache/smqrt")


def test_it_is_taken_when_it_is_there(spark_home: Path) -> None:
    assert jvm.archive_options(JAVA) == []
    path = made()
    assert jvm.archive_options(JAVA) == [f"-XX:SharedArchiveFile={path}", "-Xshare:auto", "-Xlog:disable"]


def test_half_an_archive_is_not_taken(spark_home: Path) -> None:
    made(1000)
    assert jvm.archive_options(JAVA) == []


def test_a_path_that_spark_would_cut_is_not_taken(spark_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(spark_home.parent / "my cache"))
    made()
    assert jvm.archive_options(JAVA) == []


def test_another_java_or_spark_has_another_one(spark_home: Path) -> None:
    made()
    assert jvm.archive_options(jvm.Java(JAVA.command, "17.0.16", 17)) == []
    assert jvm.archive_options(jvm.Java(Path("/opt/java/bin/java"), "17.0.15", 17)) == []
    (spark_home / "jars" / "spark.jar").write_bytes(b"another")
    assert jvm.archive_options(JAVA) == []
    made()
    assert jvm.archive_options(JAVA) != []
    os.utime(spark_home / "jars" / "spark.jar", (0, 0))
    assert jvm.archive_options(JAVA) == [], "Java compares times too"


def test_without_spark(spark_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jvm.util, "find_spec", lambda name: None)
    assert jvm.archive_options(JAVA) == []
    with pytest.raises(PipelineError, match="pyspark is not installed; run: pip install"):
        jvm.archive(JAVA)


def test_failing_java_is_reported(spark_home: Path, tmp_path: Path) -> None:
    """spark-submit isn't even there."""
    with pytest.raises(PipelineError, match=r"Spark did not start \(.*\); run: smqrt pipeline doctor"):
        jvm._train(JAVA, [])


def test_the_archive_is_made_before_what_it_saves_is_measured(
    spark_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first Spark is given the name of a new archive; the two others start without and with it."""
    started: list[list[str]] = []

    def train(found: jvm.Java, options: list[str], *words: str) -> float:
        started.append([*options, *words])
        for option in options:
            if option.startswith("-XX:ArchiveClassesAtExit="):
                Path(option.partition("=")[2]).write_bytes(bytes(2 << 20))
        return 10.0 - len(started)

    monkeypatch.setattr(jvm, "find_java", lambda: JAVA)
    monkeypatch.setattr(jvm, "_train", train)
    path = jvm.archive(JAVA)
    assert jvm.build() == jvm.WarmupResult(path, 2 << 20, 8.0, 7.0)
    assert started[0][-1] == "everything"
    assert started[1:] == [[], [f"-XX:SharedArchiveFile={path}", "-Xshare:auto", "-Xlog:disable"]]
    assert jvm.create_archive(JAVA) == path
    assert len(started) == 4
    assert list(path.parent.iterdir()) == [path]


def test_java_that_makes_no_archive(spark_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jvm, "_train", lambda found, options, *words: 1.0)
    with pytest.raises(PipelineError, match=r"Java created no archive; .* run: .*bin/java -Xshare:dump"):
        jvm.create_archive(JAVA)


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_java_takes_the_classes_of_spark_from_the_archive(tmp_path: Path) -> None:
    """scripts/test has made it, for all tests that start Spark."""
    found = jvm.find_java()
    path = jvm.archive(found)
    if not path.exists():
        assert jvm.create_archive(found) == path
    assert path.stat().st_size > 50 << 20
    [archive, *_] = jvm.archive_options(found)
    assert archive == f"-XX:SharedArchiveFile={path}"
    log = tmp_path / "classes"
    # With -Xshare:on Java doesn't start when the archive doesn't fit.
    options = f"{archive} -Xshare:on -Xlog:class+load:file={log}"
    submit = Path(str(util.find_spec("pyspark").origin)).parent / "bin" / "spark-submit"
    environment = os.environ | {"JAVA_HOME": str(found.home), "SPARK_SUBMIT_OPTS": options}
    subprocess.run([submit, "--version"], env=environment, check=True, capture_output=True, timeout=100)
    loaded = re.findall(r"(org\.apache\.spark\.\S+) source: (.*)", log.read_text())
    assert len(loaded) > 10
    assert {where for name, where in loaded if "Lambda" not in name} == {"shared objects file (top)"}
