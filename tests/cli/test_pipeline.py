"""`smqrt pipeline`: what each command says and does, without Spark; what runs in Spark is in tests/pipeline."""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import deltalake
import pyarrow
import pytest
from click.testing import CliRunner, Result
from pyiceberg.catalog.sql import SqlCatalog

from smqrt.cli import cli
from smqrt.cli.pipeline import shown_progress, status_line, status_table
from smqrt.journal import commit
from smqrt.journal import files as locations
from smqrt.manual.pages import pages as manual
from smqrt.pipeline import status as process
from smqrt.pipeline.status import FILE, Status
from tests.cli.terminals import on_a_terminal
from tests.conftest import REPOSITORY
from tests.pipeline.recorded import Recorded
from tests.support.waiting import wait_until

PIPELINES = """
from smqrt.pipeline import alert, publish, source, table


@source("site1/#", json="device string, temp double")
def readings(rows):
    return rows


@publish(to="agg/{device}", mode="update")
def means(readings):
    return readings.groupBy("device").avg("temp")


@table("silver/readings")
def kept(readings):
    return readings
"""
QUERY = """
import sys, time, signal
from pathlib import Path
from smqrt.pipeline import status as process
from smqrt.pipeline.status import StatusWriter

state = Path(sys.argv[1])
board = StatusWriter(state)
working = sys.argv[2:]
for name in working:
    board.starting(name, "publish")
terminated = []
signal.signal(signal.SIGTERM, lambda *_: terminated.append(1))
print("ready", flush=True)
while working:
    for name in list(working):
        if terminated or process.stop_requested(state / name):
            working.remove(name)
            board.ended(name, "stopped")
    time.sleep(0.02)
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    app = tmp_path / "plant"
    (app / "pipelines").mkdir(parents=True)
    (app / "pipelines" / "plant.py").write_text(PIPELINES)
    return app


@pytest.fixture
def smqrt(app: Path) -> Callable[..., Result]:
    def call(command: str, *words: str) -> Result:
        return CliRunner().invoke(cli, ["pipeline", command, *words, "--app", str(app)])

    return call


@pytest.fixture
def queries(app: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """A factory of processes that run queries as the runner does, but for Spark: `queries("hot", "cold")`."""
    running = []

    def start(*names: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", QUERY, str(app / ".pipelines"), *names]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY))
        assert running[-1].stdout
        assert running[-1].stdout.readline() == "ready\n"
        return running[-1]

    yield start
    for process_ in running:
        process_.kill()
        process_.wait()


def keep(app: Path, status: Status) -> None:
    folder = app / ".pipelines" / status.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(json.dumps(asdict(status)))


STATUS = Status(
    *("means", "publish", "stopped"),
    batch=7,
    batch_ms=1234,
    rows_per_s=2013.4,
    lag_rows=12_000,
    lag_s=5.96,
    state_rows=1204,
    state_bytes=2_500_000,
    watermark="2026-11-20T15:14:05.000Z",
    dropped_by_watermark=3,
    future=4,
    bad_json=3,
    expectations={"temp < 80": 2},
)


# ---- list


def test_list_names_queries_and_where_they_are_written(smqrt: Callable[..., Result], app: Path) -> None:
    keep(app, replace(STATUS, name="kept"))
    result = smqrt("list")
    assert result.exit_code == 0, result.output
    file = app / "pipelines" / "plant.py"
    assert result.output.splitlines() == [
        f"means  publish  agg/{{device}}     never ran  {file}:10",
        f"kept   table    silver/readings  stopped    {file}:15",
    ]


def test_list_of_a_broken_file(smqrt: Callable[..., Result], app: Path) -> None:
    (app / "pipelines" / "broken.py").write_text("def f(:\n")
    result = smqrt("list")
    assert result.exit_code == 1
    assert "broken.py:1: it isn't Python" in result.output


def test_list_without_queries(smqrt: Callable[..., Result], app: Path) -> None:
    (app / "pipelines" / "plant.py").unlink()
    assert smqrt("list").output == ""


# ---- status


def test_status_as_a_table(smqrt: Callable[..., Result], app: Path) -> None:
    keep(app, STATUS)
    result = smqrt("status")
    assert result.exit_code == 0
    assert [re.split(" {2,}", text.rstrip()) for text in result.output.splitlines()] == [
        ["query", "state", "batch", "rows/s", "lag", "batch time", "kept", "watermark", "too late", "left out"],
        [
            *("means", "stopped", "7", "2,013", "12,000 rows 6.0 s", "1,234 ms", "1,204 rows 2.5 MB"),
            *("2026-11-20 15:14:05 UTC", "3", "9"),
        ],
    ]


def test_status_names_long_silent_queries(smqrt: Callable[..., Result], app: Path) -> None:
    keep(app, STATUS)
    journal = Recorded(app / ".journal").add(30).seal().path
    commit.report_progress(locations.HubAddress.of(journal), "means", "means", {"n1": 10})
    assert "means has read nothing" not in smqrt("status").output
    os.utime(journal / "readers" / "means.json", (time.time() - 90_000,) * 2)
    told = smqrt("status").output.splitlines()[-1]
    assert told.startswith("means has read nothing since ")
    assert told.endswith(", and 20 messages are unread in the journal; run it, or smqrt pipeline reset means")
    keep(app, replace(STATUS, name="other", state="running", pid=os.getpid(), ui="http://127.0.0.1:4040"))
    process.claim(app / ".pipelines" / "other")
    assert f"Spark UI of process {os.getpid()}: http://127.0.0.1:4040" in smqrt("status", "other").output


def test_status_as_json(smqrt: Callable[..., Result], app: Path) -> None:
    keep(app, replace(STATUS, updated=1.5))
    keep(app, replace(STATUS, name="other"))
    (found,) = map(json.loads, smqrt("status", "--json", "means").output.splitlines())
    assert found == asdict(STATUS) | {"since": None, "updated": "1970-01-01T00:00:01.500000Z"}
    assert len(smqrt("status", "--json").output.splitlines()) == 2


def test_status_reports_failed_and_killed_queries(smqrt: Callable[..., Result], app: Path) -> None:
    keep(app, replace(STATUS, state="failed", error="plant.py:10: means: no such column"))
    result = smqrt("status")
    assert result.exit_code == 1
    assert "means: plant.py:10: means: no such column" in result.output
    keep(app, replace(STATUS, state="running", pid=1))
    result = smqrt("status")
    assert result.exit_code == 1
    assert result.output.splitlines()[1].split()[:2] == ["means", "dead"]


def test_status_reports_unbounded_state(smqrt: Callable[..., Result], app: Path) -> None:
    keep(app, replace(STATUS, warning="its state grows without bound: groupBy by device string has no watermark."))
    result = smqrt("status")
    assert "means: its state grows without bound: groupBy by device string has no watermark." in result.output
    assert json.loads(smqrt("status", "--json").output)["warning"].startswith("its state grows")


STEERING = "\x1b]0;owned\x07\x1b[2J\x9b2J\u202e"
SHOWN = r"\x1b]0;owned\x07\x1b[2J\x9b2J\u202e"


def test_received_text_does_not_control_the_terminal(smqrt: Callable[..., Result], app: Path) -> None:
    """A message of a stranger stands in the error of the query that it broke, and its time in the watermark."""
    keep(app, replace(STATUS, state="failed", error=f"bad value {STEERING}", watermark=STEERING))
    output = smqrt("status").output
    assert f"means: bad value {SHOWN} " in output.replace("\n", " ")
    assert output.count(SHOWN) == 2
    assert not set(STEERING) & set("\x1b\x07\x9b\u202e") & set(output)


def test_nor_while_one_watches(app: Path) -> None:
    keep(app, replace(STATUS, state="failed", error=f"bad value {STEERING}", watermark=STEERING))
    words = ["pipeline", "status", "--watch", "--app", str(app)]
    printed = on_a_terminal([sys.executable, "-m", "smqrt", *words], lambda printed: printed.count(SHOWN) > 2)
    assert not set(drawn(printed)) & set("\x1b\x07\x9b\u202e")


def test_nor_in_what_run_reports(app: Path) -> None:
    code = "import pathlib, sys; from smqrt.cli.pipeline import shown_progress\n"
    code += "with shown_progress(pathlib.Path(sys.argv[1]), []) as report: report(sys.argv[2])"
    command = [sys.executable, "-c", code, str(app), STEERING]
    printed = on_a_terminal(command, lambda printed: SHOWN in printed)
    assert not set(drawn(printed)) & set("\x1b\x07\x9b\u202e")


def drawn(printed: str) -> str:
    """What was printed, without what Rich itself steers the terminal with: colours, lines and the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[AKhlm]", "", printed)


def test_status_of_what_never_ran(smqrt: Callable[..., Result], app: Path) -> None:
    result = smqrt("status")
    assert (result.exit_code, result.output) == (0, f"Nothing has run yet with the state in {app}/.pipelines.\n")
    keep(app, STATUS)
    result = smqrt("status", "nonsense")
    assert result.exit_code == 1
    assert f"nonsense never ran with the state in {app}/.pipelines; known queries: means." in result.output


def test_watching_goes_on_until_ctrl_c(app: Path) -> None:
    keep(app, STATUS)
    command = [sys.executable, "-m", "smqrt", "pipeline", "status", "--watch", "--app", str(app)]
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 200))
    watching = subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, text=True)
    os.close(theirs)
    printed = ""
    while "means" not in printed:
        printed += os.read(ours, 1 << 16).decode()
    assert watching.poll() is None
    watching.send_signal(signal.SIGINT)
    _, errors = watching.communicate(timeout=20)
    os.close(ours)
    assert (watching.returncode, errors) == (0, "")


# ---- stop


def test_stop_ends_one_query_then_the_process(
    smqrt: Callable[..., Result], queries: Callable[..., subprocess.Popen[str]], app: Path
) -> None:
    both = queries("hot", "cold")
    result = smqrt("stop", "hot")
    assert (result.exit_code, result.output) == (0, "hot is stopped\n")
    assert both.poll() is None
    assert process.running(app / ".pipelines" / "cold") == both.pid
    assert smqrt("stop").output == "cold is stopped\nhot was not running\n"
    assert both.wait(5) == 0


def test_stop_waits_at_most_the_set_time(
    smqrt: Callable[..., Result], queries: Callable[..., subprocess.Popen[str]]
) -> None:
    stuck = queries("hot")
    os.kill(stuck.pid, signal.SIGSTOP)
    result = smqrt("stop", "--timeout", "0.2")
    assert result.exit_code == 1
    assert f"hot is still running as process {stuck.pid}; use kill -9 {stuck.pid}, which loses no data" in result.output


# ---- reset


def test_reset_removes_checkpoint_table_and_journal_mark(smqrt: Callable[..., Result], app: Path) -> None:
    keep(app, replace(STATUS, name="kept"))
    keep(app, replace(STATUS, name="kept.dead_letters"))
    for folder in ("silver/readings", "silver/readings@3f2a", "silver/other"):
        (app / ".tables" / folder).mkdir(parents=True)
    readers = app / ".journal" / "readers"
    readers.mkdir(parents=True)
    for name in ("kept", "kept.readings", "kept.dead_letters", "means"):
        (readers / f"{name}.json").touch()
    result = smqrt("reset", "kept")
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in readers.iterdir()) == ["kept.dead_letters.json", "means.json"]
    assert [path.name for path in (app / ".tables" / "silver").iterdir()] == ["other"]
    assert [path.name for path in (app / ".pipelines").iterdir()] == ["kept.dead_letters"]
    assert len(result.output.splitlines()) == 5


def test_reset_keeps_a_table_when_asked(smqrt: Callable[..., Result], app: Path) -> None:
    keep(app, replace(STATUS, name="kept"))
    (app / ".tables" / "silver" / "readings").mkdir(parents=True)
    assert smqrt("reset", "kept", "--keep-output").output == f"Removed {app}/.pipelines/kept\n"
    assert (app / ".tables" / "silver" / "readings").exists()


def test_reset_refuses_while_the_query_runs(
    smqrt: Callable[..., Result], queries: Callable[..., subprocess.Popen[str]], app: Path
) -> None:
    running = queries("means")
    result = smqrt("reset", "means")
    assert result.exit_code == 1
    assert f"means is running as process {running.pid}: stop it first with smqrt pipeline stop means." in result.output
    assert (app / ".pipelines" / "means" / FILE).exists()


@pytest.mark.parametrize("name", ["nonsense", "..", ".", "a/../means", ".spark"])
def test_reset_of_what_never_ran(smqrt: Callable[..., Result], app: Path, name: str) -> None:
    keep(app, STATUS)
    (app / ".pipelines" / ".spark").mkdir()
    result = smqrt("reset", name)
    assert result.exit_code == 1
    assert f"{name} never ran" in result.output
    assert (app / ".pipelines" / ".spark").exists()


# ---- init


def test_init_makes_a_pipeline_that_can_be_read(smqrt: Callable[..., Result], app: Path) -> None:
    result = smqrt("init", "per_minute")
    assert result.exit_code == 0, result.output
    files = ["per_minute.py", "tests/messages.jsonl", "tests/per_minute.json"]
    assert result.output.splitlines() == [
        *(f"Created {app}/pipelines/{file}" for file in files),
        f"Try it with: smqrt pipeline test --app {app}; run it with: smqrt pipeline run per_minute --app {app}",
    ]
    assert "per_minute  publish  per_minute/{device}" in smqrt("list").output


def test_a_second_one_shares_the_rows(smqrt: Callable[..., Result], app: Path) -> None:
    smqrt("init", "one")
    (app / "pipelines/tests/messages.jsonl").write_text("mine\n")
    assert smqrt("init", "two").output.startswith(f"Created {app}/pipelines/two.py\nTry it")
    assert (app / "pipelines/tests/messages.jsonl").read_text() == "mine\n"
    assert {"one", "two"} <= {text.split()[0] for text in smqrt("list").output.splitlines()}


@pytest.mark.parametrize("name", ["per-minute", "class", "1st", "a/b", "", "_hidden", "test_it"])
def test_init_with_a_name_that_no_function_can_have(smqrt: Callable[..., Result], app: Path, name: str) -> None:
    result = smqrt("init", name)
    assert result.exit_code == 1
    assert f"{name!r} is not a function name: use letters, digits and '_'" in result.output
    assert [path.name for path in (app / "pipelines").iterdir()] == ["plant.py"]


def test_init_overwrites_nothing(smqrt: Callable[..., Result], app: Path) -> None:
    result = smqrt("init", "plant")
    assert result.exit_code == 1
    assert f"{app}/pipelines/plant.py already exists: choose another name." in result.output
    assert (app / "pipelines" / "plant.py").read_text() == PIPELINES
    assert not (app / "pipelines" / "tests").exists()


# ---- doctor, submit, run


def test_doctor_reports_each_finding_and_exits_with_1(smqrt: Callable[..., Result], app: Path) -> None:
    result = smqrt("doctor", "--no-spark")
    assert result.exit_code == 1
    lines = {text.split()[1]: text for text in result.output.splitlines()}
    assert {
        "java",
        "pyspark",
        "pandas",
        "pyarrow",
        "protobuf",
        "memory",
        "disk",
        "state",
        "temp",
        "journal",
        "hub",
        "pipelines",
    } == set(lines)
    assert lines["pipelines"] == "ok     pipelines   means, kept"
    assert lines["journal"].startswith(f"FAULT  journal     {app}/.journal is not the folder of a journal")


def test_submit_prints_what_it_would_do(smqrt: Callable[..., Result], app: Path) -> None:
    result = CliRunner().invoke(
        cli,
        [
            "pipeline",
            "submit",
            "kept",
            "--app",
            str(app),
            "--master",
            "spark://h:7077",
            "--dry-run",
            "--",
            "--foo",
            "bar",
        ],
    )
    assert result.exit_code == 0, result.output
    assert "--foo bar" in result.output
    assert result.output.rstrip().endswith(f"--from latest --app {app} kept")
    assert f"--journal {app}/.journal --state {app}/.pipelines" in result.output


YARN = ("--master", "yarn", "--deploy-mode", "cluster", "--journal", "http://hub:9357/rtl/journal/plant")


def test_submit_with_tables_elsewhere(smqrt: Callable[..., Result]) -> None:
    result = smqrt("submit", *YARN, "--state", "file:///mnt/state", "--tables", "s3a://bucket/t", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "--state /mnt/state --from latest --tables s3a://bucket/t" in result.output


@pytest.mark.parametrize("command", ["status", "stop", "list", "run", "doctor"])
def test_no_folder_is_named_like_a_scheme(
    smqrt: Callable[..., Result], command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    result = smqrt(command, "--state", "s3a://bucket/state")
    assert result.exit_code == 1
    assert "s3a://bucket/state is not a folder of this machine" in result.output
    assert not list(Path.cwd().iterdir())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("nonsense", "--master", "yarn"), "There is no pipeline 'nonsense'"),
        (("--master", "nonsense"), "--master nonsense is not a cluster"),
        (("--master", "yarn", "--deploy-mode", "cluster"), "pass --state with a folder that every machine can access"),
        (("--master", "yarn", "--state", "abfss://c@h/s"), "--state abfss://c@h/s is not a folder of this machine"),
        (("--master", "yarn", "--journal", "s3a://b/j"), "The journal s3a://b/j is not a folder of this machine"),
        ((*YARN, "--state", "/mnt/s"), "kept: the relative path 'silver/readings' has no base folder in a cluster"),
        ((*YARN, "--state", "/mnt/s", "--tables", "t"), "--tables t: with --deploy-mode cluster give a path"),
    ],
)
def test_submit_that_cannot_be(smqrt: Callable[..., Result], words: tuple[str, ...], sentence: str) -> None:
    result = smqrt("submit", *words, "--dry-run")
    assert result.exit_code == 1
    assert sentence in result.output


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("nonsense",), "There is no pipeline 'nonsense'"),
        (("readings",), "readings is a source and not a query"),
        ((), ".journal is not the folder of a journal"),
        (("--journal", "http://127.0.0.1:9/rtl/journal/plant"), "needs a token"),
        (("--journal", "ftp://nowhere"), "ftp://nowhere is not a folder of this machine: name its folder, or the http"),
        (
            ("--state", "s3a://b/state"),
            "--state s3a://b/state is not a folder of this machine: name a folder, which all machines",
        ),
    ],
)
def test_run_that_cannot_be(smqrt: Callable[..., Result], words: tuple[str, ...], sentence: str) -> None:
    result = smqrt("run", *words)
    assert result.exit_code == 1
    assert sentence in result.output


def test_backfill_publishes_nothing_unasked(smqrt: Callable[..., Result], app: Path) -> None:
    Recorded(app / ".journal").add(10).seal()
    result = smqrt("backfill", "means", "--from", "earliest")
    assert result.exit_code == 1
    assert "a backfill publishes only on request: add --republish" in result.output


def test_test_without_rows(smqrt: Callable[..., Result], app: Path) -> None:
    result = smqrt("test")
    assert result.exit_code == 1
    assert f"There is no .jsonl file in {app}/pipelines/tests; select the rows of the test" in result.output
    assert "There is no pipeline 'nonsense'" in smqrt("test", "nonsense").output
    assert "There is no pipeline 'nonsense'" in smqrt("test", str(app / "pipelines"), "nonsense").output


# ---- what is shown


def test_a_line_for_a_log() -> None:
    assert status_line(STATUS) == (
        "means stopped, batch 7, 2,013 rows/s, lag 12,000 rows 6.0 s, batch time 1,234 ms, kept 1,204 rows 2.5 MB, "
        "watermark 2026-11-20 15:14:05 UTC, too late 3, left out 9"
    )
    assert "lag –, batch time" in status_line(Status("hot"))
    assert "lag –, batch time" in status_line(Status("hot", state="disk full"))
    assert status_line(Status("hot", state="failed", error="no hub")) == (
        "hot failed, batch -, 0 rows/s, lag 0 rows 0.0 s, batch time 0 ms: no hub"
    )


def test_a_watermark_of_today_needs_no_date() -> None:
    today = time.strftime("%Y-%m-%d", time.gmtime())
    assert "watermark 01:02:03 UTC" in status_line(replace(STATUS, watermark=f"{today}T01:02:03.456Z"))


@pytest.mark.parametrize(("width", "left_out"), [(200, 0), (114, 2), (90, 4), (80, 4), (66, 5), (20, 5)])
def test_a_narrow_terminal_shows_fewer_columns(width: int, left_out: int) -> None:
    assert len(status_table([STATUS], width).columns) == 10 - left_out
    assert status_table([STATUS], width).columns[0].header == "query"


def test_names_with_markup_are_escaped() -> None:
    assert [str(cell) for cell in status_table([Status("[bold]hot")]).columns[0].cells] == ["[bold]hot"]


def test_lines_while_it_runs(app: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A line when a state changes; what an earlier run left behind isn't shown."""
    state = app / ".pipelines"
    keep(app, replace(STATUS, name="old", since=time.time() - 1000))
    with shown_progress(state, ["means", "old"]) as report:
        process.claim(state / "means")
        keep(app, replace(STATUS, state="running", since=time.time()))
        printed = wait_until(lambda: capfd.readouterr().err)
        report("something [red]failed")
        keep(app, replace(STATUS, state="stopped", since=time.time()))
    printed += capfd.readouterr().err
    assert [text.partition(",")[0] for text in printed.splitlines()] == [
        "means running",
        "something [red]failed",
        "means stopped",
    ]


WATCHED = """
import sys, time
from pathlib import Path
from smqrt.cli.pipeline import shown_progress

with shown_progress(Path(sys.argv[1]), ["means"]) as report:
    time.sleep(1.5)
    report("the hub is away")
    time.sleep(0.7)
"""


def test_a_live_table_while_it_runs_on_a_terminal(app: Path) -> None:
    keep(app, replace(STATUS, since=time.time() + 60))
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    command = [sys.executable, "-c", WATCHED, str(app / ".pipelines")]
    child = subprocess.Popen(command, stderr=theirs, stdin=theirs, env=os.environ | {"TERM": "xterm"})
    os.close(theirs)
    assert child.wait(30) == 0
    printed = os.read(ours, 1 << 16).decode()
    os.close(ours)
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", printed)
    assert len(re.findall(r"means +stopped +2,013", drawn)) >= 3, "it is drawn again and again"
    assert "the hub is away\r\n" in drawn
    assert "\x1b[1A" in printed, "in place"


# ---- the manual


def test_every_command_and_option_is_documented() -> None:
    from smqrt.cli.pipeline import pipeline

    before, *sections = re.split("^### ", manual()["pipeline-commands"], flags=re.MULTILINE)
    text = {section.partition("\n")[0]: section for section in sections}
    assert set(text) == set(pipeline.commands)
    missing = [
        (name, option)
        for name, command in pipeline.commands.items()
        for parameter in command.params
        for option in parameter.opts
        if option.startswith("-") and f"`{option}" not in text[name] + before
    ]
    assert missing == []
    assert not [name for name in text if f"smqrt pipeline {name}" not in text[name]]


def test_status_takes_the_journal(smqrt: Callable[..., Result], app: Path, tmp_path: Path) -> None:
    """As `run` does: so that silent readers of a journal elsewhere are told of."""
    assert smqrt("status", "--journal", str(tmp_path)).stderr == smqrt("status").stderr
    assert smqrt("status", "--journal", "http://127.0.0.1:9/rtl/journal/x", "--token", "t").exit_code == 0


TWO = """
from smqrt.pipeline import source, table
@source()
def rows(df): return df
@table("a", format="FORMAT")
def first(rows): return rows
@table("b", format="FORMAT")
def second(rows): return rows
"""


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_nothing_is_deleted_when_one_table_refuses(smqrt: Callable[..., Result], app: Path, kind: str) -> None:
    for old in (app / "pipelines").glob("*.py"):
        old.unlink()
    (app / "pipelines" / "two.py").write_text(TWO.replace("FORMAT", kind))
    contents = {"a": pyarrow.table({"temp": [1.0, 2.0]}), "b": pyarrow.table({"other": [1.0]})}
    for name, rows in contents.items():
        place = app / ".tables"
        place.mkdir(exist_ok=True)
        if kind == "delta":
            deltalake.write_deltalake(place / name, rows)
        else:
            catalog = SqlCatalog("smqrt", uri=f"sqlite:///{place}/iceberg.db", warehouse=place.as_uri())
            catalog.create_namespace_if_not_exists("tables")
            catalog.create_table(f"tables.{name}", rows.schema, location=(place / name).as_uri()).append(rows)
    for condition in ("temp < 5", "temp <", "temp < 5) or (1 = 1"):
        done = smqrt("optimize", "first", "second", "--delete", condition)
        assert (done.exit_code, done.stdout) == (1, ""), done.output
        assert f"Error: {condition!r}" in done.stderr
    assert smqrt("optimize", "first", "--delete", "temp < 2").stdout.startswith("first: rows deleted: 1; ")


def test_optimize(smqrt: Callable[..., Result], app: Path) -> None:
    """Joins, deletes and vacuums tables; says what else there is none of."""
    refused = smqrt("optimize")
    assert refused.exit_code == 1
    assert refused.stderr.startswith("Error: None of these queries has a Delta or Iceberg table: use @table(")
    text = PIPELINES.replace('@table("silver/readings")', '@table("silver/readings", format="delta")')
    (app / "pipelines" / "plant.py").write_text(text)
    assert "There is no Delta table in" in smqrt("optimize").stderr
    for number in range(3):
        rows = pyarrow.table({"temp": [float(number)]})
        deltalake.write_deltalake(app / ".tables" / "silver" / "readings", rows, mode="append")
    assert smqrt("optimize", "--vacuum", "5m").stderr.startswith("Error: --vacuum 5m: use 1h or more")
    done = smqrt("optimize", "kept", "--vacuum", "1h", "--delete", "temp < 1")
    assert done.stdout == "kept: rows deleted: 1; small files joined: 2 to 1; old files removed: 0\n", done.output
    text = PIPELINES.replace('@table("silver/readings")', '@table("iceberg/readings", format="iceberg")')
    (app / "pipelines" / "plant.py").write_text(text)
    assert "There is no Iceberg table in" in smqrt("optimize").stderr
    place = app / ".tables" / "iceberg"
    catalog = SqlCatalog("smqrt", uri=f"sqlite:///{place}/iceberg.db", warehouse=place.as_uri())
    catalog.create_namespace("tables")
    status_table = catalog.create_table("tables.readings", rows.schema, location=(place / "readings").as_uri())
    for number in range(3):
        status_table.append(pyarrow.table({"temp": [float(number)]}))
    done = smqrt("optimize", "kept", "--vacuum", "1h", "--delete", "temp < 1")
    assert done.stdout == "kept: rows deleted: 1; small files joined: 2 to 1; old files removed: 0\n", done.output


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Lets every write fail from now on, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # it would be cut off, and kept
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_optimize_without_room(smqrt: Callable[..., Result], app: Path, no_room: Callable[[], None]) -> None:
    """One sentence, and no colours of a library; a table that can't be opened too."""
    text = PIPELINES.replace('@table("silver/readings")', '@table("readings", format="delta")')
    (app / "pipelines" / "plant.py").write_text(text)
    place = app / ".tables" / "readings"
    for number in range(2):
        deltalake.write_deltalake(place, pyarrow.table({"temp": [float(number)]}), mode="append")
    no_room()
    refused = smqrt("optimize").stderr
    assert refused.startswith(f"Error: The table in {place} can't be opened or written: ")
    assert refused.endswith("File too large (os error 27). It is unchanged.\n")
    assert refused.count("\n") == 1
    assert "\x1b" not in refused
    assert deltalake.DeltaTable(place).version() == 1
    next((place / "_delta_log").glob("*1.json")).write_text("{")
    refused = smqrt("optimize").stderr
    assert refused.startswith(f"Error: The table in {place} can't be opened or written: ")
    assert refused.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--from", "yesterday"], "--from 'yesterday' must be a duration such as 2h"),
        (["--from", '{"n1": "x"}'], "is not an offset: use JSON"),
        (["--trigger", "5parsecs"], "--trigger '5parsecs' is not a duration; write a number and a unit"),
        (["--master", "foo"], "--master 'foo' is not a Spark master: write local[*]"),
        (["--master", "local[0]"], "--master 'local[0]' is not a Spark master"),
        (["--driver-memory", "lots"], "--driver-memory 'lots' is not a size of memory"),
        (["--metrics", "99999"], "'--metrics': 99999 is not in the range 0<=x<=65535"),
        (["--hub-retry", "-1"], "'--hub-retry': -1.0 is not in the range x>=0"),
        (["men"], "There is no pipeline 'men' in "),
        (["other"], "declared: "),
    ],
)
def test_wrong_options_are_reported_before_spark_starts(
    smqrt: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, options: list[str], told: str
) -> None:
    monkeypatch.setattr("smqrt.pipeline.session.start_spark", lambda *_: pytest.fail("it starts"))
    refused = smqrt("run", *options)
    assert told in refused.stderr
    assert refused.exit_code in (1, 2)
    assert "Traceback" not in refused.stderr


def test_wrong_options_of_submit(smqrt: Callable[..., Result]) -> None:
    assert "--master foo is not a cluster" in smqrt("submit", "--master", "foo", "--dry-run").stderr
    refused = smqrt("submit", "--master", "yarn", "--from", "yesterday", "--dry-run").stderr
    assert refused.startswith("Error: --from 'yesterday' must be")
