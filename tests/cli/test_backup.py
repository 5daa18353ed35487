"""`smqrt backup`: taken while a hub writes and compacts, restored to another folder, all of it there."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from smqrt import hub
from smqrt.journal.reader import Journal
from tests.cli.commands import Command
from tests.journal import written as rows

PROGRAM = """
import sys, gevent
from pathlib import Path
from smqrt import hub
from smqrt.journal.reader import Journal
from tests.journal import written as rows
from smqrt.smq.gevent_broker import TopicRules, set_topic_rules
set_topic_rules(TopicRules(sync_s=0.05))
folder = Path(sys.argv[1])
smq = hub.create(persist=folder / "names.db", lastvalue="#",
                 journal={"path": str(folder / ".journal"), "segment_bytes": "64KiB"})
for n in range(10**9):
    smq.publish(b"%08d" % n * 8, "news", "sub")
    if n % 100 == 0:
        smq.create("topic %d" % n)
        print(n, flush=True)
        gevent.sleep(0.01)
"""


def smqrt(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "smqrt", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture
def written(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """A folder that a hub writes to, and the hub."""
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "users.txt").write_text("eve:x")
    (folder / "link").symlink_to("users.txt")
    writer = subprocess.Popen([sys.executable, "-c", PROGRAM, folder], stdout=subprocess.PIPE, text=True)
    yield folder, writer
    writer.kill()
    writer.communicate()


def progress(writer: subprocess.Popen[str], lines: int) -> int:
    """The number that the hub has published after so many lines more."""
    assert writer.stdout
    return int([writer.stdout.readline() for _ in range(lines)][-1])


@pytest.mark.servers
def test_a_backup_is_taken_and_restored(written: tuple[Path, subprocess.Popen[str]], tmp_path: Path) -> None:
    folder, writer = written
    published = progress(writer, 50)
    compacting = subprocess.Popen(
        [sys.executable, "-m", "smqrt", "journal", "compact", folder, "--grace", "0s"], stdout=subprocess.DEVNULL
    )
    target = tmp_path / "backup"
    made = smqrt("backup", target, folder)
    assert compacting.wait(60) == 0
    assert made.returncode == 0, made.stderr
    assert made.stdout == f"{target}: 1 SQLite file, 1 file, 1 journal, checked\n"
    restored = tmp_path / "restored"
    shutil.copytree(target / "app", restored, symlinks=True)
    assert (restored / "users.txt").read_text() == "eve:x"
    assert os.readlink(restored / "link") == "users.txt"
    names = restored / "names.db"
    with hub.create(persist=names, lastvalue="#", journal={"path": str(restored / ".journal")}) as smq:
        known = {name for _, name in smq.topics()}
        assert {"news", f"topic {published - 100}"} <= known
        values = smq._broker.last_values
        assert values is not None
        [frame] = [frame for one in values for frame, _ in one.newest.values()]
        assert int(frame[15:23]) >= published - 1000, "no older than the interval between two commits, and a bit"
    checked = smqrt("journal", "verify", restored)
    assert checked.stdout.endswith("no faults\n"), checked.stdout + checked.stderr
    assert json.loads(smqrt("journal", "stats", restored, "--json").stdout)["rows"] >= published - 1000


def test_uncopyable_files_are_reported(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    database = tmp_path / "app" / "names.db"
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE t (x)")
        connection.executemany("INSERT INTO t VALUES (?)", [("x" * 500,)] * 200)
    connection.close()
    assert smqrt("backup", tmp_path, tmp_path / "app").stderr.startswith(f"Error: {tmp_path} exists. Use a new folder")
    data = bytearray(database.read_bytes())
    data[4096 * 3 : 4096 * 5] = b"\xff" * 8192
    database.write_bytes(data)
    made = smqrt("backup", tmp_path / "copy", tmp_path / "app")
    assert (made.returncode, made.stdout) == (1, "")
    assert f"{database} is damaged: " in made.stderr or f"Cannot copy {database}: " in made.stderr


def test_torn_ends_are_cut_off_in_the_copy(tmp_path: Path) -> None:
    """A hub writes batch and index while they are copied: neither need be whole, nor as far as the other."""
    cuts = [(0, 0, 90), (20, 0, 80), (64, 0, 80), (0, 100, 80), (30, 100, 80), (640, 0, 90)]
    for number, (cut_index, cut_data, left) in enumerate(cuts):
        journal = tmp_path / f"journal-{number}"
        rows.write(journal, [rows.BATCHES, [80, 90]])
        end = journal / "wal/n1" / f"{71:020d}"
        for path, cut in ((end.with_suffix(".idx"), cut_index), (end.with_suffix(".arrows"), cut_data)):
            os.truncate(path, max(0, path.stat().st_size - cut))
        before = {path: path.read_bytes() for path in sorted(journal.rglob("*")) if path.is_file()}
        Command("backup").done(tmp_path / f"backup-{number}", journal)
        copy = tmp_path / f"backup-{number}" / journal.name
        checked = Command("journal")("verify", copy)
        assert (checked.exit_code, checked.stderr) == (0, "")
        assert [row.seq for row in Journal(copy).rows({}, Journal(copy).end())] == [*range(left)]
        assert not [path for path in copy.rglob("*") if path.name == "lock" or path.suffix == ".damaged"]
        assert before == {path: path.read_bytes() for path in sorted(journal.rglob("*")) if path.is_file()}
