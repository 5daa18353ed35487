"""Every `--json` speaks the words of one page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from smqrt.pipeline.status import Status
from tests.conftest import REPOSITORY, Served

APPLICATION = """
from smqrt import hub

smq = hub.create(journal=True)
dir.setfunc(lambda request, relpath: relpath == "smq" and (smq.connect(request), True)[1])
"""


def documented() -> set[str]:
    return set(re.findall(r"`(\w+)`", (REPOSITORY / "smqrt/help/command-line.md").read_text("utf-8")))


def smqrt(*arguments: str | Path) -> list[dict[str, object]]:
    command = [sys.executable, "-m", "smqrt", *map(str, arguments)]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    return [json.loads(line) for line in printed.splitlines()]


def test_every_name_is_documented(tmp_path: Path, serve: Callable[..., Served]) -> None:
    (tmp_path / ".preload.py").write_text(APPLICATION)
    served = serve(tmp_path)
    subscribing = [sys.executable, "-m", "smqrt", "sub", served.url, "t", "self", "--json", "--count", "1"]
    with subprocess.Popen(subscribing, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as subscriber:
        assert subscriber.stderr
        assert subscriber.stderr.readline().startswith("self is ETID")
        smqrt("pub", served.url, "t", '{"a": 1}', "--subtopic", "s")
        live = json.loads(subscriber.communicate(timeout=20)[0])
    assert served.stop() == 0
    (kept,) = smqrt("journal", "tail", tmp_path, "--json")
    (stats,) = smqrt("journal", "stats", tmp_path, "--json")
    assert set(live) - {"ts"} <= set(kept), "the journal knows everything that a subscriber sees"
    same = set(live) - {"ts", "subtopic"}  # a subscriber knows the number of a sub-topic, not always its name
    assert {name: kept[name] for name in same} == {name: live[name] for name in same}
    assert kept["subtopic"] == "s"
    assert {*live, *kept, *stats} - documented() == set()
    assert {field.name for field in fields(Status)} - documented() == set()
