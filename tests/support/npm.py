"""npm packages of the tests, in `.venv/npm` (scripts/test installs them), and the client's own package."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent.parent
PACKAGE = REPOSITORY / "smqrt" / "clients" / "javascript"
MODULES = Path(os.environ.get("NPM_OF_TESTS", REPOSITORY / ".venv" / "npm")) / "node_modules"
COMMANDS = MODULES / ".bin"
"""A folder with `node`, of a version with WebSockets, and `tsc`; for a PATH."""
RUN_S = 100
QUIET = {"npm_config_audit": "false", "npm_config_fund": "false", "npm_config_update_notifier": "false"}
QUIET |= {"NODE_NO_WARNINGS": "1", "NO_COLOR": "1"}


def command(*words: str | Path) -> tuple[list[str], dict[str, str]]:
    """The arguments and the environment to run `npm`, or `node` of the tests."""
    assert (COMMANDS / "node").exists(), "scripts/test installs npm packages"
    path = f"{COMMANDS}{os.pathsep}{os.environ['PATH']}"
    program = shutil.which(str(words[0]), path=path)
    assert program, f"{words[0]} is missing; scripts/test installs it"
    return [program, *map(str, words[1:])], os.environ | QUIET | {"PATH": path}


@contextmanager
def started(*words: str | Path, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """A program that goes on until the end of the block."""
    arguments, env = command(*words)
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(arguments, cwd=cwd, env=env, **piped) as process:
        try:
            yield process
        finally:
            process.terminate()


def run(*words: str | Path, cwd: Path, check: bool = True, **more: Any) -> subprocess.CompletedProcess[str]:
    """Runs `npm`, or `node` of the tests; the output has errors too."""
    arguments, env = command(*words)
    done = subprocess.run(
        arguments,
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_S,
        **more,
    )
    assert not check or done.returncode == 0, f"{' '.join(map(str, words))}: {done.stdout}"
    return done


def install_client(folder: Path) -> None:
    """Puts the client's package into `folder/node_modules`, from the archive that `npm pack` makes."""
    archive = run("npm", "pack", "--silent", PACKAGE, cwd=folder).stdout.split()[-1]
    run("npm", "install", "--offline", "--ignore-scripts", "--no-save", f"./{archive}", cwd=folder)
