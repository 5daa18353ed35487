"""Other systems get a sentence, not a traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("platform", ["darwin", "win32"])
@pytest.mark.parametrize("words", [["serve"], ["pub", "x"], ["--help"]])
def test_other_systems_get_a_sentence(platform: str, words: list[str]) -> None:
    code = f"import sys; from smqrt.cli import main; sys.platform = {platform!r}; sys.argv = ['', *{words!r}]; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"smqrt needs Linux; this is {platform}. Use WSL on Windows, a virtual machine on macOS.\n"
