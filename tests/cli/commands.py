"""Commands of `smqrt`, run in the process of the test."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner, Result

from smqrt.cli import cli


class Command:
    """One command, or a group of them.

    Args:
        name: such as "journal".
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *words: str | Path) -> Result:
        return CliRunner().invoke(cli, [self._name, *map(str, words)], prog_name="smqrt")

    def done(self, *words: str | Path) -> str:
        """Returns what it has printed; it must succeed."""
        result = self(*words)
        assert result.exit_code == 0, result.output
        return result.stdout

    def refused(self, *words: str | Path) -> tuple[int, str]:
        """Returns the exit code and the sentence."""
        result = self(*words)
        assert "Traceback" not in result.output
        return result.exit_code, result.stderr.strip().splitlines()[-1].removeprefix("Error: ")
