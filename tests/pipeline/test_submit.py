"""Submission to a cluster: the archive and the command. That clusters run it, test_clusters shows."""

from __future__ import annotations

import json
import shlex
import stat
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from smqrt.errors import PipelineError
from smqrt.pipeline.submit import Submission, prepare, unpack

PIPELINE = "from smqrt.pipeline import source\n\n@source('#')\ndef rows(df):\n    return df\n"


@pytest.fixture
def submission(tmp_path: Path) -> Submission:
    pipelines = tmp_path / "app" / "pipelines"
    (pipelines / "tests").mkdir(parents=True)
    (pipelines / "hot.py").write_text(PIPELINE)
    (pipelines / "devices.csv").write_text("device\n")
    (pipelines / "tests" / "rows.jsonl").write_text("{}\n")
    (pipelines / "__pycache__").mkdir()
    (pipelines / "__pycache__" / "hot.pyc").touch()
    app = tmp_path / "app"
    return Submission(("hot",), "spark://10.0.0.1:7077", app, str(app / ".journal"), app / ".pipelines")


def words(submission: Submission) -> list[str]:
    return prepare(submission).words


def option(given: list[str], name: str) -> str:
    return given[given.index(name) + 1]


def test_a_standalone_cluster(submission: Submission) -> None:
    given = words(submission)
    folder = submission.app / ".pipelines" / "submit"
    assert Path(given[0]).parts[-3:] == ("pyspark", "bin", "spark-submit")
    assert option(given, "--master") == "spark://10.0.0.1:7077"
    assert option(given, "--deploy-mode") == "client"
    assert option(given, "--name") == "smqrt hot"
    assert option(given, "--py-files") == str(folder / "smqrt.zip")
    assert f"spark.pyspark.driver.python={sys.executable}" in given
    driver = given.index(str(folder / "driver.py"))
    assert given[driver + 1 :] == [
        *("--journal", str(submission.app / ".journal"), "--state", str(submission.state), "--from", "latest"),
        *("--app", str(submission.app), "hot"),
    ]


def test_how_it_runs_reaches_the_driver(submission: Submission) -> None:
    given = words(replace(submission, start="2h", once=True, republish=True, names=(), extra=("--executor-cores", "2")))
    driver = given.index(str(submission.app / ".pipelines/submit/driver.py"))
    assert given[driver - 2 : driver] == ["--executor-cores", "2"]
    assert given[driver + 5 :] == ["--from", "2h", "--app", str(submission.app), "--once", "--republish"]
    assert option(given, "--name") == "smqrt pipelines"


def test_kubernetes(submission: Submission) -> None:
    """The driver runs in a pod: it has neither this machine's folders nor its Python."""
    given = words(
        replace(
            submission,
            master="k8s://https://10.0.0.1:6443",
            deploy_mode="cluster",
            journal="https://hub.example/rtl/journal/app",
            state=Path("/mnt/state"),
            python="/usr/bin/python3.11",
            extra=("--conf", "spark.kubernetes.container.image=registry.example/spark-smqrt"),
        )
    )
    assert option(given, "--deploy-mode") == "cluster"
    assert "spark.pyspark.python=/usr/bin/python3.11" in given
    assert not any("driver.python" in word or "log4j2" in word for word in given)
    assert "--app" not in given
    assert option(given, "--journal") == "https://hub.example/rtl/journal/app"
    assert option(given, "--state") == "/mnt/state"
    assert given[-1] == "hot"


def test_yarn(submission: Submission) -> None:
    given = words(replace(submission, master="yarn", deploy_mode="cluster", state=Path("/shared/state")))
    assert (option(given, "--master"), option(given, "--deploy-mode")) == ("yarn", "cluster")


def test_the_archive_holds_what_other_machines_lack(submission: Submission) -> None:
    archive = option(words(submission), "--py-files")
    names = set(zipfile.ZipFile(archive).namelist())
    assert {"smqrt/__init__.py", "smqrt/pipeline/runner.py", "pyspark_smq/__init__.py"} <= names
    assert {name for name in names if name.startswith("smqrt_app")} == {
        "smqrt_app/pipelines/hot.py",
        "smqrt_app/pipelines/devices.csv",
    }
    assert not [name for name in names if name.endswith((".lua", ".js", ".md", ".pyc"))]


def test_the_archive_is_enough(submission: Submission, tmp_path: Path) -> None:
    """What Spark's workers import, imported where nothing else of ours is on the path."""
    archive = option(words(submission), "--py-files")
    packages = str(Path(zipfile.__file__).parent)
    site = next(path for path in sys.path if path.endswith("site-packages"))
    code = (
        "import sys; native = [path for path in sys.path if 'lib-dynload' in path]\n"
        f"sys.path[:] = [{archive!r}, {packages!r}, *native, {site!r}]\n"
        "sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]\n"
        "import pyspark_smq, smqrt.pipeline.runner, smqrt.journal.reader\n"
        "print(pyspark_smq.__file__)"
    )
    ran = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert ran.stdout.startswith(archive), ran.stderr


def test_the_driver_takes_the_pipelines_out_of_the_archive(submission: Submission, tmp_path: Path) -> None:
    archive = option(words(submission), "--py-files")
    app = unpack(["", str(tmp_path), archive], tmp_path / "unpacked")
    assert (app / "pipelines" / "hot.py").read_text() == PIPELINE
    assert not (tmp_path / "unpacked" / "smqrt").exists()


def test_no_list_of_processes_shows_the_token(submission: Submission) -> None:
    command = prepare(replace(submission, token="a token of sixteen"))
    assert "a token of sixteen" not in str(command)
    path = Path(option(command.words, "--properties-file"))
    assert "--load-spark-defaults" in command.words
    assert path.read_text() == "spark.smqrt.token a token of sixteen\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    prepare(replace(submission, token="another token, longer"))
    assert path.read_text() == "spark.smqrt.token another token, longer\n"


def test_certificates_travel_to_a_driver_in_the_cluster(submission: Submission, tmp_path: Path) -> None:
    cafile = tmp_path / "authority.pem"
    cafile.write_text("PEM")
    here = replace(submission, journal="https://hub/rtl/journal/app", cafile=str(cafile))
    assert option(words(here), "--cafile") == str(cafile)
    there = replace(here, deploy_mode="cluster", master="yarn", tables="s3a://x")
    assert option(words(there), "--cafile") == "cafile.pem"
    app = unpack([str(submission.app / ".pipelines" / "submit" / "smqrt.zip")], tmp_path / "unpacked")
    assert (app / "cafile.pem").read_text() == "PEM"


def test_what_is_printed_can_be_typed(submission: Submission) -> None:
    command = prepare(replace(submission, names=("it's", "hot")))
    java_home, python, *given = shlex.split(str(command))
    assert java_home == f"JAVA_HOME={command.environment['JAVA_HOME']}"
    assert python == f"PYSPARK_PYTHON={sys.executable}"
    assert given == command.words


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"master": "mesos://host"}, "--master mesos://host is not a cluster: use spark://HOST:PORT"),
        ({"deploy_mode": "cluster"}, "spark://10.0.0.1:7077 runs Python drivers only on this machine"),
        (
            {"master": "yarn", "deploy_mode": "cluster", "journal": ".journal"},
            "--journal .journal: with --deploy-mode cluster give a path that all machines can access, or an http",
        ),
        (
            {"master": "yarn", "deploy_mode": "cluster", "journal": "http://localhost:9357/rtl/journal/app"},
            "is another machine in the cluster: use the hub's address there",
        ),
        (
            {"token": "a token of sixteen", "extra": ("--properties-file", "mine.conf")},
            "Spark takes only one: write spark.smqrt.token into yours instead",
        ),
    ],
)
def test_what_cannot_be_submitted(submission: Submission, change: dict[str, object], sentence: str) -> None:
    with pytest.raises(PipelineError) as caught:
        prepare(replace(submission, **change))  # type: ignore[arg-type]
    assert sentence in str(caught.value)


def test_a_folder_that_cannot_be_written(submission: Submission) -> None:
    (submission.app / ".pipelines").touch()
    with pytest.raises(PipelineError, match="can't be written: "):
        prepare(submission)


@pytest.mark.parametrize(
    ("master", "mode", "url", "told"),
    [
        ("spark://10.0.0.1:7077", "client", "http://127.0.0.1:9357/rtl/journal/app", True),
        ("yarn", "cluster", "http://127.0.0.1:9357/rtl/journal/app", True),
        ("spark://10.0.0.1:7077", "client", "http://10.0.0.9:9357/rtl/journal/app", False),
        ("spark://127.0.0.1:7077", "client", "http://127.0.0.1:9357/rtl/journal/app", False),
        ("local-cluster[2,1,1024]", "client", "http://127.0.0.1:9357/rtl/journal/app", False),
    ],
)
def test_a_hub_that_workers_do_not_reach(submission: Submission, master: str, mode: str, url: str, told: bool) -> None:
    """The folder of a journal names its hub as this machine reaches it; large results go there from a worker."""
    publishing = (
        PIPELINE.replace("source", "source, publish", 1) + "@publish(to='x')\ndef out(rows):\n    return rows\n"
    )
    (submission.app / "pipelines" / "hot.py").write_text(publishing)
    journal = submission.app / ".journal"
    journal.mkdir()
    (journal / "hub.json").write_text(json.dumps({"url": url, "token": "x" * 43}))
    given = ["submit", "out", "--app", submission.app, "--master", master, "--deploy-mode", mode, "--dry-run"]
    command = [sys.executable, "-m", "smqrt", "pipeline", *map(str, given), "--state", str(submission.state)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (f"has the hub's address {url}, which is another machine in the cluster" in ran.stderr) == told
    assert ("Give its address in the cluster with --journal and --token." in ran.stderr) == told
    assert ran.returncode == (1 if told and mode == "cluster" else 0)
