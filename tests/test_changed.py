"""`scripts/test --changed`: which test files a change can break."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.changed import affected, changed_files, read_sources

SOURCES = {
    "smqrt/__init__.py": "",
    "smqrt/__main__.py": "from smqrt.cli import main",
    "smqrt/cli/__init__.py": "from importlib import import_module",
    "smqrt/cli/serve.py": "import smqrt.server",
    "smqrt/server.py": "def run():\n    from smqrt import queue",
    "smqrt/queue.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import smqrt.hints",
    "smqrt/hints.py": "",
    "smqrt/lua/__init__.py": "from . import vm",
    "smqrt/lua/vm.py": "",
    "tests/conftest.py": "import smqrt.queue\ndef serve(): run('smqrt')",
    "tests/helper.py": "from smqrt.lua import vm",
    "tests/test_queue.py": "from smqrt.queue import Queue",
    "tests/test_server.py": "def test(serve): ...",
    "tests/lua/test_vm.py": "from tests.helper import vm",
    "tests/lua/test_app.py": "APP = 'apps' / \"shop\"",
}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("tests/test_queue.py", ["test_queue"]),
        ("smqrt/lua/vm.py", ["test_vm"]),
        ("tests/helper.py", ["test_vm"]),
        ("smqrt/cli/serve.py", ["test_server"]),
        ("smqrt/server.py", ["test_server"]),
        ("smqrt/queue.py", ["test_queue", "test_app", "test_vm", "test_server"]),
        ("smqrt/hints.py", []),
        ("smqrt/gone.py", []),
        ("smqrt/lua/lib/core.lua", ["test_vm"]),
        ("tests/lua/rows.json", ["test_app", "test_vm"]),
        ("tests/apps/examples/shop/.preload", ["test_app"]),
        ("README.md", []),
    ],
)
def test_a_change_affects(changed: str, expected: list[str]) -> None:
    assert [Path(path).stem for path in affected([changed], SOURCES)] == expected


def test_those_farther_away_can_be_left_out() -> None:
    assert affected(["smqrt/lua/vm.py"], SOURCES, 1) == []
    assert affected(["smqrt/lua/vm.py"], SOURCES, 2) == ["tests/lua/test_vm.py"]


def test_changed_files(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        own = ["-c", "user.name=x", "-c", "user.email=x@example.com", "-c", "init.defaultBranch=main"]
        subprocess.run(["git", *own, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    for name in ("committed", "edited", "removed", "same"):
        (tmp_path / name).write_text(name)
    git("add", ".")
    git("commit", "-m", "base")
    git("checkout", "-b", "branch")
    (tmp_path / "committed").write_text("changed")
    git("commit", "-am", "change")
    (tmp_path / "edited").write_text("changed")
    (tmp_path / "removed").unlink()
    (tmp_path / "new").touch()
    assert changed_files(tmp_path) == ["committed", "edited", "new", "removed"]


def test_every_module_of_this_tree_can_be_read() -> None:
    found = affected(["smqrt/wire/nats.py"], read_sources())
    assert {"tests/wire/test_nats.py", "tests/cluster/nats/test_client.py", "tests/test_architecture.py"} <= {*found}
