"""mypy over modules that use smqrt, with one cache for all tests."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

from tests.conftest import REPOSITORY

DISABLED = "var-annotated"
"""Error code of mypy that is off: an empty list or queue needs an annotation; pyright does not ask for it."""


def check(folder: Path) -> str:
    """Return what `mypy --strict` prints about the modules in a folder.

    All tests use the same options, since mypy checks the package again for others: 17 s of CPU. scripts/test keeps the
    cache. One mypy runs at a time, since the cache is a database. Tests that wait for it need a longer timeout.

    Args:
        folder: its modules are checked.
    """
    cache = Path(sys.pycache_prefix or folder) / "mypy-of-examples"
    cache.mkdir(parents=True, exist_ok=True)
    options = ["--strict", "--config-file=", "--follow-imports=silent", f"--disable-error-code={DISABLED}"]
    command = [sys.executable, "-m", "mypy", *options, f"--cache-dir={cache}", "."]
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env={"MYPYPATH": str(REPOSITORY)})
    assert not done.stderr, done.stderr
    return done.stdout
