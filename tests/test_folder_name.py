"""The repository in a folder named `smqrt`, as `git clone` makes it: no test takes the folder for the package."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
TESTS = ("tests/broker/test_call_counts.py", "tests/test_architecture.py::test_only_the_command_line_patches")
"""The rule of the tree that needs the layers of all modules, but does not parse them: that takes a second."""


def test_a_clone_in_a_folder_named_smqrt(tmp_path: Path) -> None:
    clone = tmp_path / "smqrt"
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True).stdout
    for name in listing.decode().split("\0"):
        source, target = REPOSITORY / name, clone / name
        if name and source.is_file():  # a file that was removed and not committed is listed too
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    ran = subprocess.run(command, cwd=clone, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
