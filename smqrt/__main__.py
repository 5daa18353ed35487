"""Entry point of `smqrt` and `python -m smqrt`."""

import sys

from smqrt.process import early_signals


def main() -> None:
    """Run the command line; see `smqrt.cli.main`."""
    if sys.argv[1:2] in (["serve"], ["demo"]) or sys.argv[1:3] == ["pipeline", "run"]:
        early_signals.hold()  # before the imports below, which take a tenth of a second
    from smqrt.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
