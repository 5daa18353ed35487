"""Releases behind a symbolic link: a hot restart starts what the link points to now."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.conftest import Served
from tests.server.restart.hot import HotServed, application
from tests.support.waiting import wait_until

pytestmark = pytest.mark.servers


@pytest.fixture
def current(tmp_path: Path) -> Path:
    """A link to the first of two releases, each an application in a folder `app`."""
    for number in (1, 2):
        application(tmp_path / f"releases/{number}/app", release=f"<?lsp response:write '{number}' ?>")
    link = tmp_path / "current"
    link.symlink_to("releases/1")
    return link


def switch(current: Path) -> None:
    """Points the link to the second release, and removes the first."""
    new = current.with_name("new")
    new.symlink_to("releases/2")
    new.rename(current)
    shutil.rmtree(current.with_name("releases") / "1")


def release(served: Served) -> str:
    with urlopen(f"{served.url}/release.lsp", timeout=10) as answer:
        return answer.read().decode()


def test_a_new_process_starts_behind_the_link(serve_hot: Callable[..., HotServed], current: Path) -> None:
    served = serve_hot("app", cwd=current, env={"PWD": str(current)})
    device = served.device()
    assert release(served) == "1"
    switch(current)
    for _ in range(2):  # the second time by a process that was started by the first
        served.restart()
        assert release(served) == "2"
    device.expect_nothing()


def test_new_workers_start_behind_the_link(serve: Callable[..., Served], current: Path) -> None:
    served = serve("app", "--workers", "2", cwd=current, env={"PWD": str(current)})
    assert release(served) == "1"
    switch(current)
    served.process.send_signal(signal.SIGUSR2)
    served.wait_for("^restart: 2 new workers serve", 60)
    wait_until(lambda: {release(served) for _ in range(10)} == {"2"}, served.lines)


def test_pwd_counts_only_when_it_names_the_working_folder(current: Path) -> None:
    script = "from smqrt.process import current_process; print(current_process.FOLDER)"
    folders = {}
    for used in (str(current), "", "relative", "/", "/no/such/folder"):
        environment = os.environ | {"PWD": used}
        ran = subprocess.run(
            [sys.executable, "-c", script], cwd=current, env=environment, capture_output=True, text=True
        )
        folders[used] = ran.stdout.strip()
    actual = str(current.resolve())
    expected = {str(current): str(current), "": actual, "relative": actual, "/": actual, "/no/such/folder": actual}
    assert folders == expected


def test_a_relative_program_is_found_behind_the_link(current: Path) -> None:
    (current / "python").symlink_to(sys.executable)
    script = "from smqrt.process import current_process; print(current_process.COMMAND[0])"
    environment = os.environ | {"PWD": str(current), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ran = subprocess.run(
        [str(current / "python"), "-c", script], cwd=current, env=environment, capture_output=True, text=True
    )
    assert ran.stdout.strip() == str(current / "python"), ran.stderr
    relative = subprocess.run(["./python", "-c", script], cwd=current, env=environment, capture_output=True, text=True)
    assert relative.stdout.strip() == str(current / "python"), relative.stderr
