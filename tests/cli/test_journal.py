"""`smqrt journal`: what each command prints, writes and refuses."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import polars
import pytest
from gevent import get_hub
from gevent import subprocess as green

from smqrt.cli.connect import connection_options
from smqrt.cli.journal import journal
from smqrt.journal import arrow, readers, segment
from smqrt.journal.reader import Journal
from smqrt.journal.settings import names
from smqrt.manual.pages import pages as manual
from smqrt.server.mqtt import take_mqtt
from tests.cli.commands import Command
from tests.journal.sensor_rows import NOON_US, readings, row, write
from tests.support.local_broker import LocalBroker
from tests.support.waiting import wait_until

FORMER = "2026-11-20T12:00:0"


smqrt = Command("journal")
done, refused = smqrt.done, smqrt.refused


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    write(folder / ".journal", readings(2000))
    odd = [row(2000, NOON_US + 2_000_000_000, None, b"\xff", flags=1), row(2001, NOON_US + 2_000_000_001, "a", b"last")]
    write(folder / ".journal", odd)
    return folder


@pytest.fixture
def app(tmp_path: Path, recorded: Path) -> Path:
    """An application whose hub has recorded 2000 readings and a few odd messages, in three segments."""
    return shutil.copytree(recorded, tmp_path / "plant")


# ---- tail


def test_client_text_does_not_control_the_terminal(app: Path) -> None:
    evil = "\x1b[2J\x9b31m\u202e\n"
    odd = row(2002, NOON_US + 2_000_000_002, "a" + evil, evil.encode(), subtopic=evil, uid=evil)
    write(app / ".journal", [odd])
    for words in (("tail", app), ("tail", app, "--json"), ("stats", app, "--top", "99")):
        shown = done(*words)
        assert "2J" in shown
        assert all(line.isprintable() for line in shown.splitlines()), shown
        assert not set(shown) & set("\x1b\x9b\u202e\x85")


def test_tail(app: Path) -> None:
    lines = done("tail", app, "-n", "2").splitlines()
    assert lines[0] == "2026-11-20T12:33:20.000000Z  (to 4711)  sensor  0xff  [direct]"
    assert lines[1] == "2026-11-20T12:33:20.000001Z  a  sensor  last"
    assert len(done("tail", app).splitlines()) == 20
    assert len(done("tail", app / ".journal", "-t", "site1/+/temp", "-t", "a", "--count", "5").splitlines()) == 5
    assert done("tail", app, "-t", "nobody") == ""


def test_tail_for_programs(app: Path) -> None:
    read = [json.loads(line) for line in done("tail", app, "--json", "-n", "3").splitlines()]
    assert [one["seq"] for one in read] == [1999, 2000, 2001]
    assert json.loads(read[0]["payload"])["count"] == read[0]["json"]["count"] == 1999
    assert read[1]["payload_hex"] == "ff"


def test_tail_from_a_time(app: Path) -> None:
    assert [json.loads(line)["seq"] for line in done("tail", app, "--json", "--from", "1998").splitlines()] == [
        1998,
        1999,
        2000,
        2001,
    ]
    at_ten = done("tail", app, "--from", "2026-11-20T12:00:10", "-n", "1")
    assert at_ten.startswith("2026-11-20T12:00:10.000000Z")
    assert len(done("tail", app, "--from", "earliest").splitlines()) == 2002
    assert done("tail", app, "--from", "latest") == ""


def test_tail_follows(app: Path) -> None:
    command = [sys.executable, "-m", "smqrt", "journal", "tail", str(app), "-n", "1", "--follow"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        assert process.stdout.readline().endswith("last\n")
        write(app / ".journal", [row(2002, topic="b", payload=b"new")])
        assert process.stdout.readline() == f"{FORMER}0.000000Z  b  sensor  new\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
    finally:
        process.kill()
        process.wait()


def test_tail_into_head(app: Path) -> None:
    command = f"{sys.executable} -m smqrt journal tail {app} --from earliest | head -1"
    ended = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(FORMER)


def test_tail_needs_no_pyarrow_for_segments(app: Path) -> None:
    code = "import sys; sys.modules['pyarrow'] = None; from smqrt.cli import main; main()"
    command = [sys.executable, "-c", code, "journal", "tail", str(app), "-n", "1"]
    assert subprocess.run(command, capture_output=True, check=True).stdout.endswith(b"last\n")


def test_what_is_compacted_needs_pyarrow(app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done("compact", app, "--all", "--grace", "0s")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    sentence = "Reading compacted rows needs pyarrow, which is not installed: pip install 'smqrt[spark]'."
    assert refused("tail", app) == (1, sentence)


# ---- stats


def test_stats(app: Path) -> None:
    readers.save_report(app / ".journal", {"query": "q7", "name": "q", "offset": {"n1": 1000}, "time_us": 0})
    lines = done("stats", app, "--top", "2").splitlines()
    assert [line.split()[:2] for line in lines[:7]] == [
        ["messages", "2,002"],
        ["from", "2026-11-20T12:00:00.000000Z"],
        ["to", "2026-11-20T12:33:20.000001Z"],
        ["per", "second"],
        ["segments", "3,"],
        ["compacted", "0,"],
        ["node", "n1:"],
    ]
    assert lines[6] == "node       n1: 0 to 2001"
    assert lines[9] == "topic      and 20 more (--top)"
    assert lines[10] == "reader     q7 is 1,002 messages behind"


def test_stats_for_programs(app: Path, tmp_path: Path) -> None:
    read = json.loads(done("stats", app, "--json", "--top", "1"))
    assert (read["rows"], read["segments"], read["offsets"]) == (2002, 3, {"n1": [0, 2002]})
    assert len(read["topics"]) == 1
    assert json.loads(done("stats", app, "--json", "--top", "0"))["topics"] is None
    (tmp_path / "empty" / "wal").mkdir(parents=True)
    assert "messages   0" in done("stats", tmp_path / "empty")


# ---- verify


def test_verify(app: Path) -> None:
    lines = ["3 segments with 2,002 messages in 33 batches", "0 compacted files with 0 messages", "no faults"]
    assert done("verify", app).splitlines() == lines


def test_verify_finds_and_repairs(app: Path) -> None:
    newest = segment.paths(app / ".journal" / "wal" / "n1")[-1]
    with newest.open("ab") as file:
        file.write(b"torn")
    result = smqrt("verify", app)
    assert result.exit_code == 1
    sentence = "4 bytes after its last batch belong to no batch"
    remedy = "the hub cuts that off when it starts; --repair does it now"
    assert result.stderr.splitlines() == [f"{newest}: {sentence}; {remedy}.", "Error: 1 fault"]
    assert done("verify", app, "--repair").splitlines()[0] == "removed 4 bytes of an incomplete message"
    assert "no faults" in done("verify", app)


def test_verify_does_not_repair_damage(app: Path) -> None:
    oldest = segment.paths(app / ".journal" / "wal" / "n1")[0]
    data = bytearray(oldest.read_bytes())
    data[-9] ^= 1
    oldest.write_bytes(data)
    result = smqrt("verify", app, "--repair")
    assert result.exit_code == 1
    assert "its checksum is wrong" in result.stderr
    assert oldest.read_bytes() == data


# ---- compact


def test_compact(app: Path) -> None:
    text = done("compact", app)
    assert text.startswith("2 segments with 2,000 messages: 1 file, 311.")
    assert text.endswith("; 2 old segments to be removed by a later run (--grace 60s)\n")
    assert "nothing to compact" in done("compact", app, "--grace", "0s")
    assert done("tail", app, "-n", "3", "--json").count("\n") == 3
    assert "no faults" in done("verify", app)
    assert len(done("tail", app, "--from", "earliest").splitlines()) == 2002


def test_compact_with_typed_columns(app: Path) -> None:
    import pyarrow.parquet as pq

    done("compact", app, "--schema", "site1/#=device string, temp double", "--schema", "a=temp double", "--all")
    (path,) = app.glob(".journal/data/*/*/*.parquet")
    kinds = str(pq.ParquetFile(path).schema_arrow.field("json").type)
    assert kinds == "struct<device: string, temp: double>"


def test_compact_again_and_again(app: Path) -> None:
    command = [sys.executable, "-m", "smqrt", "journal", "compact", str(app), "--watch", "0.2s", "--grace", "0s"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        assert process.stdout.readline().startswith("2 segments")
        write(app / ".journal", [row(2002)])
        assert process.stdout.readline().startswith("1 segment with 2 messages: 1 file, ")
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130


def test_watching_continues_after_an_error(app: Path) -> None:
    data = segment.paths(app / ".journal" / "wal" / "n1")[0]
    whole = data.read_bytes()
    data.write_bytes(whole[:-100])
    command = [sys.executable, "-m", "smqrt", "journal", "compact", str(app), "--watch", "0.1s"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stderr
    try:
        assert f"{data} can't be compacted: the batch with" in process.stderr.readline()
        data.write_bytes(whole)
        assert process.stdout.readline().startswith("2 segments with 2,000 messages")
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=10)


def test_what_compact_refuses(app: Path, tmp_path: Path) -> None:
    assert refused("compact", tmp_path)[0] == 1
    assert "'dubble' is not a type of JSON" in refused("compact", app, "--schema", "a=temp dubble")[1]
    assert "not TOPICS=DDL" in refused("compact", app, "--schema", "temp double")[1]
    assert refused("compact", app, "--after", "soon")[0] == 2
    held = segment.lock(app / ".journal" / "wal" / "n1")
    assert f"is written by process {os.getpid()}" in refused("compact", app, "--all")[1]
    os.close(held)


# ---- export and schema


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".csv", ".jsonl"])
def test_export(app: Path, suffix: str) -> None:
    to = app / f"out{suffix}"
    words = ("--from", "2026-11-20T12:00:10", "--until", "2026-11-20T12:00:20", "--to", to)
    assert done("export", app, *words).startswith(f"10 messages in {to} (")
    assert to.stat().st_size > 100


@pytest.mark.parametrize(("start", "end"), [("20", "10"), ("2026-11-20T12:00:20", "2026-11-20T12:00:10")])
def test_an_end_before_the_start(app: Path, start: str, end: str) -> None:
    told = refused("export", app, "--from", start, "--until", end, "--to", app / "x.csv")
    assert told == (2, f"--from {start} is after --until {end}. Swap them.")
    assert not (app / "x.csv").exists()


def test_export_lines(app: Path) -> None:
    done("export", app, "--to", app / "out.jsonl", "-t", "a")
    (line,) = (app / "out.jsonl").read_text().splitlines()
    assert json.loads(line)["payload"] == "last"
    assert refused("export", app, "--to", app / "out.xml")[0] == 2


def test_schema(app: Path) -> None:
    result = smqrt("schema", app, "site1/#")
    assert result.stdout.startswith("device string, temp double, humidity double, battery bigint, count bigint")
    count = sum(one.topic.startswith("site1/") for one in readings(2000) if one.topic)
    assert result.stderr == f"matches {count} of {count} payloads (100.0%)\n"
    assert smqrt("schema", app, "site1/#", "--rows", "10").stderr == "matches 10 of 10 payloads (100.0%)\n"


def test_schema_here(app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(app)
    assert done("schema", "+/+/temp").startswith("device string")


def test_what_has_no_schema(app: Path) -> None:
    assert refused("schema", app, "nobody") == (
        1,
        "no messages to 'nobody'. List topics with `smqrt journal stats`.",
    )
    assert refused("schema", app, "a")[1] == "the 1 newest payloads of 'a' are not JSON: no DDL"
    assert refused("schema", app, "a", "b")[0] == 2
    assert refused("schema", app, "a/#/b")[0] == 2


# ---- replay


def collected(broker: LocalBroker, *topics: str) -> list[tuple[str, float, bytes]]:
    got: list[tuple[str, float, bytes]] = []
    for topic in topics:
        broker.smq.subscribe(topic, lambda data, *_, name=topic: got.append((name, time.monotonic(), bytes(data))))
    return got


def replayed(*words: str | Path) -> Any:
    command = [sys.executable, "-m", "smqrt", "journal", "replay", *map(str, words)]
    process = green.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=30)
    return process.returncode, out.decode(), err.decode()


@pytest.fixture
def broker():
    local = LocalBroker()
    yield local
    local.close()


@pytest.mark.parametrize("kind", ["smq", "ws"])
def test_replay(tmp_path: Path, broker: LocalBroker, kind: str) -> None:
    rows = [row(seq, NOON_US + seq * 200_000, "t", b"%d" % seq) for seq in range(5)]
    write(tmp_path, [*rows, row(5, NOON_US + 999_999, None, b"psst", flags=1), row(6, NOON_US + 999_999, "p", flags=8)])
    got = collected(broker, "re/t", "re/p")
    address = f"{kind}://127.0.0.1:{broker.port}/smq.lsp"
    code, out, err = replayed(tmp_path, address, "--speed", "2x", "--prefix", "re/")
    assert (code, out) == (0, "5 messages published\n")
    assert err == "1 skipped: addressed to one client\n1 skipped: published by a pipeline\n"
    assert [data for _, _, data in got] == [one.payload for one in rows]
    assert 0.35 < got[-1][1] - got[0][1] < 2


def test_replay_at_full_speed_in_order(tmp_path: Path, broker: LocalBroker) -> None:
    rows = write(tmp_path, [row(seq, NOON_US + seq * 1_000_000, "t", b"%06d" % seq * 80) for seq in range(5000)])
    got = collected(broker, "t")
    assert replayed(tmp_path, f"http://127.0.0.1:{broker.port}/smq.lsp", "--speed", "max")[0] == 0
    assert [data for _, _, data in got] == [one.payload for one in rows]


def test_replay_to_mqtt_clients_and_to_others(tmp_path: Path) -> None:
    """A hub gets QoS, retain flag, properties and large messages over MQTT; over SMQ it gets the messages alone."""
    mqtt = {"qos": 1, "retain": True, "properties": '{"contenttype":"a/b","correlationdata":"AP8=","unit":["C","F"]}'}
    messages = [
        row(0, topic="t", payload=b"smq", subtopic="s", stid=3),
        row(1, topic="t", payload=b"mqtt")._replace(**mqtt),
        row(2, topic="t", payload=b"x" * 70_000)._replace(qos=2, retain=False, properties="{}"),
    ]
    opened = segment.SegmentFile.open(tmp_path / "from" / "wal/n1", 0, "n1", "hub", 2)
    opened.append(arrow.encode(messages, arrow.WITH_MQTT), 0, 3, messages[0].ts_us, messages[-1].ts_us, 0)
    opened.close()
    target = LocalBroker(mqtt=True, journal={"path": str(tmp_path / "to"), "sync": "publish"})
    target._http.take_mqtt = take_mqtt
    try:
        code, out, err = replayed(tmp_path / "from", f"mqtt://127.0.0.1:{target.port}", "--speed", "max")
        assert (code, out, err) == (0, "3 messages published\n", "")
        code, out, err = replayed(tmp_path / "from", target.url, "--speed", "max")
        assert (code, out, err) == (0, "2 messages published\n", "1 skipped: longer than 65520 bytes\n")
        found = list(Journal(tmp_path / "to").rows({}, {"n1": 100}))
    finally:
        target.close()
    assert [(one.payload[:4], *one[-3:]) for one in found[:3]] == [
        (b"smq", 0, False, '{"subtopic":"s"}'), (b"mqtt", *mqtt.values()), (b"xxxx", 2, False, "{}"),
    ]  # fmt: skip
    assert [(one.payload, *one[-3:]) for one in found[3:]] == [(b"smq", *[None] * 3), (b"mqtt", *[None] * 3)]


def test_replay_a_part(tmp_path: Path, broker: LocalBroker) -> None:
    write(tmp_path, [row(seq, NOON_US + seq * 1_000_000, f"t{seq % 2}", b"%d" % seq) for seq in range(20)])
    got = collected(broker, "t0", "t1")
    words = ("--from", "10", "--until", "2026-11-20T12:00:15", "--topic", "t1", "--speed", "max")
    assert replayed(tmp_path, f"http://127.0.0.1:{broker.port}/smq.lsp", *words)[1] == "2 messages published\n"
    assert [data for _, _, data in got] == [b"11", b"13"]


def test_what_replay_refuses(tmp_path: Path, broker: LocalBroker) -> None:
    write(tmp_path, [row(0)])
    assert refused("replay", tmp_path, "smq://127.0.0.1:1/", "--speed", "fast")[0] == 2
    assert refused("replay", tmp_path, "ftp://127.0.0.1/")[0] == 2
    code, _, err = replayed(tmp_path, "smq://127.0.0.1:1/")
    assert (code, err.count("\n")) == (1, 1)


# ---- places


def test_places(tmp_path: Path) -> None:
    sentence = f"no journal in {tmp_path}. Pass its folder, or that of an application whose hub has journal=True."
    for command in ("tail", "stats", "verify", "compact"):
        assert refused(command, tmp_path) == (1, sentence)


def test_a_time_that_is_none(app: Path) -> None:
    code, sentence = refused("tail", app, "--from", "yesterday")
    assert code == 2
    assert sentence.startswith("--from 'yesterday' must be a duration such as 2h")


# ---- the manual


def test_every_option_and_every_setting_is_documented() -> None:
    page = manual()["journal"]
    params = [(name, one) for name, command in journal.commands.items() for one in command.params]
    words = [(name, word) for name, one in params for word in one.opts if word.startswith("--")]
    common = {"--help", *(word for one in connection_options(lambda: None).__click_params__ for word in one.opts)}
    sections = {part.split("\n")[0]: part for part in page.split("\n### ")}
    everywhere = {"--token": page}
    missing = [
        (name, word) for name, word in words if word not in common and word not in everywhere.get(word, sections[name])
    ]
    assert missing == []
    assert [name for name in names() if f"| `{name}` |" not in page] == []


# ---- a journal on a hub


@pytest.mark.servers
def test_a_journal_on_a_hub(tmp_path: Path, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "from smqrt import hub\nsmq = hub.create(journal={'name': 'plant'})\nsmq.publish({'temp': 1}, 'a')\n"
    (tmp_path / ".preload.py").write_text(source)
    served = serve(tmp_path)
    url = f"{served.url}/rtl/journal/plant"
    assert refused("tail", url)[0] == 1
    assert refused("tail", url, "--token", "of somebody else")[0] == 1
    monkeypatch.setenv("SMQRT_JOURNAL_TOKEN", (tmp_path / ".journal" / "token").read_text().strip())
    shown = wait_until(lambda: done("tail", url))
    assert shown.split("  ")[1:] == ["a", "SMQ server client", '{"temp":1}', "[unrouted]", "[server]\n"]
    assert done("stats", url).splitlines()[0] == "messages   1"
    assert done("schema", url, "a") == "temp bigint\n"
    assert done("export", url, "--to", tmp_path / "out.jsonl").startswith("1 message in ")


# ---- progress


def on_a_terminal(*arguments: object) -> str:
    """Runs a command whose standard error is a terminal; gives what appeared there."""
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "smqrt", "journal", *map(str, arguments)]
    env = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, env=env)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while more := os.read(ours, 65536):
            shown += more
    os.close(ours)
    assert process.wait(60) == 0, shown
    return shown.decode()


def shown_here(*arguments: object) -> str:
    """The same in this process."""
    ours, theirs = os.openpty()
    shown: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # the end of a terminal
            while more := os.read(ours, 65536):
                shown.append(more)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with open(theirs, "w") as error, contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
            journal(list(map(str, arguments)), standalone_mode=False)
    finally:
        reader.join()
        os.close(ours)
    return b"".join(shown).decode()


def test_long_commands_show_how_far_they_are(app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    for ending in ("jsonl", "csv", "parquet"):
        assert "export" in (bar := shown_here("export", app, "--to", tmp_path / f"x.{ending}"))
        assert "/2002" in bar
    assert re.search(r"verify.*/\d", shown_here("verify", app))
    assert re.search(r"compact.*/2002", shown_here("compact", app, "--all"))
    assert "/2002" not in done("export", app, "--to", tmp_path / "y.jsonl"), "no terminal, no bar"


def test_replay_shows_how_far_it_is(tmp_path: Path, broker: LocalBroker) -> None:
    write(tmp_path, [row(seq, NOON_US + seq, "t", b"x") for seq in range(2002)])
    address = f"smq://127.0.0.1:{broker.port}/smq.lsp"
    shown = get_hub().threadpool.apply(on_a_terminal, ("replay", tmp_path, address, "--speed", "max"))
    assert re.search(r"replay.*/2002", shown)


# ---- delta


def test_delta(app: Path) -> None:
    place = app / ".journal" / "data"
    assert done("compact", app, "--delta").startswith("2 segments with 2,000 messages: ")
    assert done("delta", app) == f"{place}: 1 file, 0 added, 0 removed\n"
    assert polars.read_delta(str(place))["seq"].len() == 2000
    copy = app / "lake"
    assert done("delta", app, "--to", copy) == f"{copy}: 1 file, 1 added, 0 removed\n"
    assert polars.read_delta(str(copy))["seq"].len() == 2000


def test_export_to_elsewhere(app: Path) -> None:
    told = refused("export", app, "--to", "s3://bucket/x.csv")
    assert told == (2, "--to s3://bucket/x.csv is not a folder of this machine: write a file here, and copy it there.")
