"""The comparison runs against every broker it knows, and nobody loses a message."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parent.parent.parent / "scripts" / "bench"

pytestmark = pytest.mark.servers

PEERS = ["smqrt", "mosquitto", "nats", "redis"]


def run_compare(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    report = tmp_path / "report.json"
    command = [sys.executable, str(BENCH / "compare.py"), "--rounds", "1", "--seconds", "0.3", "--json", str(report)]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=110)


def compare(tmp_path: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    done = run_compare(tmp_path, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads((tmp_path / "report.json").read_text())


def test_every_broker_carries_every_kind_of_shape(tmp_path: Path) -> None:
    shapes = ["bulk", "fan100", "ping", "open", "mixed"]
    output, report = compare(tmp_path, *[word for shape in shapes for word in ("--only", shape)])
    assert "Nothing lost, doubled, reordered or corrupted in any run." in output
    for shape in shapes:
        assert set(PEERS) <= set(report[shape])
        assert all(runs[0]["delivered"] > 0 and runs[0]["cpu_us_per_dlv"] > 0 for runs in report[shape].values())


def test_only_ours_speaks_websocket(tmp_path: Path) -> None:
    _, report = compare(tmp_path, "--only", "websocket")
    assert list(report["websocket"]) == ["smqrt"]


def test_ten_thousand_subscribers_use_three_kilobytes_each(tmp_path: Path) -> None:
    _, report = compare(tmp_path, "--only", "idle", "--brokers", "smqrt")
    run = report["idle"]["smqrt"][0]
    assert run["ready"] == 10_000
    assert run["bytes_per_conn"] <= 3072


def test_the_python_generator_measures_the_same_shapes(tmp_path: Path) -> None:
    """One shape of every broker, and every shape of one: each protocol and each shape has code of its own."""
    lost = "Nothing lost, doubled, reordered or corrupted in any run."
    output, by_broker = compare(tmp_path, "--python", "--only", "bulk")
    assert "slower" in output
    assert lost in output
    assert set(PEERS) <= set(by_broker["bulk"])
    shapes = ["ping", "open", "mixed", "websocket"]
    words = [word for shape in shapes for word in ("--only", shape)]
    output, by_shape = compare(tmp_path, "--python", "--brokers", "smqrt", *words)
    assert lost in output
    assert set(by_shape) == set(shapes)
    for report in (by_broker, by_shape):
        assert all(runs[0]["delivered"] > 0 for found in report.values() for runs in found.values())


def test_http_beside_pywsgi_and_nginx(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, str(BENCH / "compare_http.py"), "--rounds", "1", "--seconds", "1", "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    reports = json.loads(report.read_text())
    assert set(reports) == {"static", "page", "digest", "session", "sqlite", "sqlite_opened"}
    for row, by_server in reports.items():
        assert set(by_server) == ({"smqrt", "pywsgi", "nginx"} if row in ("static", "page") else {"smqrt"})
        assert all(run["errors"] == 0 and run["per_s"] > 100 for runs in by_server.values() for run in runs)


def test_a_commit_is_compared_with_the_working_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path / "cache"))  # shows from where the modules were loaded
    done = run_compare(tmp_path, "--against", "HEAD", "--only", "bulk", "--only", "websocket")
    assert done.returncode == 0 or "more CPU than HEAD: " in done.stderr, done.stdout + done.stderr  # in one round
    report = json.loads((tmp_path / "report.json").read_text())
    assert [list(report[shape]) for shape in ("bulk", "websocket")] == [["smqrt", "HEAD"]] * 2
    assert list((tmp_path / "cache").rglob("tree/smqrt/smq/data_path.*.pyc"))


def test_an_unknown_commit_is_named(tmp_path: Path) -> None:
    done = run_compare(tmp_path, "--against", "no-such-commit", "--only", "bulk")
    assert (done.returncode, done.stderr.splitlines()[-1][:45]) == (1, "the commit no-such-commit cannot be read: fat")


@pytest.mark.parametrize(
    ("now", "before", "is_slower"),
    [
        ([5.2, 5.3, 5.4], [5.0, 5.1, 5.0], True),
        ([5.0, 5.3, 5.4], [5.0, 5.1, 5.0], False),  # one round was as cheap
        ([5.11, 5.12, 5.13], [5.0, 5.1, 5.0], False),  # what two runs of the same code differ by
        ([4.0, 4.1, 4.2], [5.0, 5.1, 5.0], False),
    ],
)
def test_slower_is_what_costs_more_in_every_round(now: list[float], before: list[float], is_slower: bool) -> None:
    program = (
        "import compare, json, sys; now, before = json.loads(sys.argv[1]); "
        "bulk = [shape for shape in compare.SHAPES if shape.key == 'bulk']; "
        "runs = lambda costs: [{'cpu_us_per_dlv': cost} for cost in costs]; "
        "print(len(compare.grown(bulk, {'bulk': {'smqrt': runs(now), 'abc': runs(before)}}, 'abc')))"
    )
    command = [sys.executable, "-c", program, json.dumps([now, before])]
    done = subprocess.run(command, cwd=BENCH, capture_output=True, text=True, check=True)
    assert int(done.stdout) == is_slower
