"""`smqrt query` on DuckDB: SQL on a journal of which half is compacted, what it prints and writes, and what ends it."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from smqrt.journal import compact, duckdb_views
from tests.cli.commands import Command
from tests.cli.terminals import on_a_terminal
from tests.journal.sensor_rows import NOON_US, readings, row, write
from tests.pipeline.hubs import JournalingHub

SLOW = "select count(*) from range(100_000_000_000) t(i) where hash(i) % 7 = 3"


smqrt = Command("query")
done, refused = smqrt.done, smqrt.refused


def lines(*words: str | Path) -> list[Any]:
    return [json.loads(line) for line in done(*words, "--format", "json").splitlines()]


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """2000 readings, half of them compacted with typed columns, and two odd messages behind."""
    folder = tmp_path / "pl'a[n]t"
    write(folder / ".journal", readings(2000))
    write(folder / ".journal", [row(2000, NOON_US, None, b"\xff", flags=1), row(2001, NOON_US, "a", b"\x1b[2J")])
    options = compact.CompactOptions(grace_s=0, schemas={"site1/#": "device string, temp double"})
    assert compact.compact(folder / ".journal", options).rows == 2000
    write(folder / ".journal", [row(2002, NOON_US, "a", b'{"temp": 1.5}')])
    return folder


def test_every_row_is_there_once(app: Path) -> None:
    found = lines("select seq, topic, text, json->>'temp' as temp from messages order by seq", app)
    assert [one["seq"] for one in found] == list(range(2003))
    assert found[1]["temp"] == json.loads(found[1]["text"])["temp"].__repr__()
    assert found[2000] == {"seq": 2000, "topic": None, "text": None, "temp": None}
    assert found[2001] == {"seq": 2001, "topic": "a", "text": "\x1b[2J", "temp": None}
    assert found[2002] == {"seq": 2002, "topic": "a", "text": '{"temp": 1.5}', "temp": "1.5"}


def test_the_range_and_the_topics(app: Path) -> None:
    topics = [one.topic for one in readings(2000)]
    count = "select count(*) as n, min(seq) as first, max(seq) as last from messages"
    assert lines(count, app, "--from", "300", "--until", "1500") == [{"n": 1200, "first": 300, "last": 1499}]
    site1 = [seq for seq, name in enumerate(topics) if name and name.startswith("site1/")]
    assert lines(count, app, "-t", "site1/#") == [{"n": len(site1), "first": site1[0], "last": site1[-1]}]
    assert lines(count, app, "-t", "a") == [{"n": 2, "first": 2001, "last": 2002}]


def test_a_view_joins_itself(app: Path) -> None:
    assert lines("select count(*) as n from messages a join messages b using (seq)", app) == [{"n": 2003}]


def test_typed_columns_are_in_the_compacted_view(app: Path) -> None:
    (found,) = lines("select count(*) as n, count(json.temp) as typed, max(date) as day from compacted", app)
    assert (found["n"], found["day"]) == (2000, "2026-11-20")
    assert found["typed"] == sum(str(one.topic).startswith("site1/") for one in readings(2000))


def test_a_journal_without_compacted_files(tmp_path: Path) -> None:
    write(tmp_path / "j", readings(10))
    assert lines("select count(*) as n from messages", tmp_path / "j") == [{"n": 10}]
    assert lines("select count(*) as n from compacted", tmp_path / "j") == [{"n": 0}]


def test_the_table(app: Path) -> None:
    head, first, second = done("select topic, text, seq from messages where seq > 2000 order by seq", app).splitlines()
    assert head.split() == ["topic", "text", "seq"]
    assert first.split() == ["a", r"\x1b[2J", "2001"]
    assert second.split() == ["a", '{"temp":', "1.5}", "2002"]


def test_a_long_table_says_that_it_is_cut(app: Path) -> None:
    result = smqrt("select seq from messages order by seq", app)
    assert result.stdout.splitlines()[-1].strip() == "999"
    assert result.stderr.startswith("Only the first 1,000 rows. For all rows use --to FILE, ")


VALUES = (
    "select 1::hugeint as whole, 1.5::decimal(9, 2) as part, '\\xff'::blob as bytes, encode('ü') as text, "
    "null as nothing, true as yes, timestamptz '2026-11-20 12:00:00+00' as at, [1, 2] as list, "
    "date '2026-11-20' as day, interval 3 day as days"
)


def test_values_as_json_and_csv(app: Path) -> None:
    (found,) = lines(VALUES, app)
    assert found.pop("days")
    assert found == {
        "whole": 1,
        "part": 1.5,
        "bytes_hex": "ff",
        "text": "ü",
        "nothing": None,
        "yes": True,
        "at": "2026-11-20T12:00:00.000000Z",
        "list": [1, 2],
        "day": "2026-11-20",
    }
    (values,) = csv.DictReader(done(VALUES, app, "--format", "csv").splitlines())
    assert {name: values[name] for name in ("whole", "part", "bytes", "text", "nothing", "yes", "list")} == {
        "whole": "1",
        "part": "1.50",
        "bytes": "0xff",
        "text": "ü",
        "nothing": "",
        "yes": "true",
        "list": "[1, 2]",
    }


@pytest.mark.parametrize("ending", ["csv", "json", "jsonl", "parquet"])
def test_files(app: Path, tmp_path: Path, ending: str) -> None:
    target = tmp_path / "out" / f"all.{ending}"
    target.parent.mkdir()
    told = done("select seq, payload from messages order by seq", app, "--to", target)
    assert told.startswith(f"2,003 rows in {target} (")
    assert list(target.parent.iterdir()) == [target]
    if ending == "parquet":
        assert pq.read_table(target)["seq"].to_pylist() == list(range(2003))
    else:
        assert len(target.read_text("utf-8").splitlines()) == 2003 + (ending == "csv")


def test_what_is_wrong_is_one_sentence(app: Path, tmp_path: Path) -> None:
    assert refused("select nix from messages", app) == (
        1,
        'Binder Error: Referenced column "nix" not found in FROM clause! Candidate bindings: "tid", "uid", "node", '
        '"ptid", "stid".',
    )
    for table in ("plant", "message"):
        assert refused(f"select * from {table}", app)[1] == (
            f"There is no table or view {table}: the messages of the journal are in the view messages, those of its "
            "compacted files also in compacted."
        )
    assert refused("selec 1", app) == (1, 'Parser Error: syntax error at or near "selec".')
    assert refused("/* nothing */", app)[1].startswith("There is no SQL: write a query, such as ")
    assert refused("select 1", app, "--format", "parquet")[0] == 2
    assert refused("select 1", app, "--to", tmp_path / "a.txt")[0] == 2
    assert refused("select 1", tmp_path)[1].startswith(f"no journal in {tmp_path}")
    target = tmp_path / "days.parquet"
    assert refused("select interval 3 day", app, "--to", target)[1].startswith(f"Cannot write {target}: ")
    assert refused("select cast(text as int) from messages", app, "--to", target)[1].startswith("Conversion Error: ")
    assert list(tmp_path.glob("*days*")) == []


def test_a_damaged_segment_is_named(app: Path) -> None:
    segment = max((app / ".journal" / "wal" / "n1").glob("*.arrows"))
    data = bytearray(segment.read_bytes())
    data[-20] ^= 1
    segment.write_bytes(data)
    code, told = refused("select max(text) from messages", app)
    assert code == 1
    assert "is damaged at offset" in told, told


def test_without_duckdb(app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    assert refused("select 1", app) == (1, duckdb_views.NEEDS_DUCKDB)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_leaves_nothing(app: Path, tmp_path: Path, number: int, code: int) -> None:
    target = tmp_path / "out"
    target.mkdir()
    command = [sys.executable, "-m", "smqrt", "query", f"{SLOW} union all select 1", str(app)]
    process = subprocess.Popen([*command, "--to", target / "a.csv"], stdout=-1, stderr=-1, text=True)
    cpu = Path(f"/proc/{process.pid}/task")
    while len(list(cpu.iterdir())) < 3:  # DuckDB's threads
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    assert (process.communicate(timeout=60), process.returncode) == (("", "Interrupted.\n"), code)
    assert list(target.iterdir()) == []


def test_a_bar_on_a_terminal(app: Path) -> None:
    printed = on_a_terminal([sys.executable, "-m", "smqrt", "query", SLOW, str(app)], lambda text: "%" in text)
    assert "query" in printed


@pytest.mark.servers
def test_a_journal_on_another_machine(tmp_path: Path) -> None:
    hub = JournalingHub(tmp_path / "hub")
    try:
        hub.publish("site1/a", 0, 100)
        compacted = lines("select count(*) as n, sum(text::int) as sum from messages", hub.journal, "-t", "site1/#")
        url, token = hub.announced["url"], hub.announced["token"]
        words = ("select count(*) as n, sum(text::int) as sum from messages", url, "--token", token, "-t", "site1/#")
        assert lines(*words) == compacted == [{"n": 100, "sum": 4950}]
    finally:
        hub.stop()


def test_a_file_elsewhere(app: Path) -> None:
    told = refused("select 1", app, "--to", "s3://bucket/x.csv")
    assert told == (2, "--to s3://bucket/x.csv is not a folder of this machine: write a file here, and copy it there.")
