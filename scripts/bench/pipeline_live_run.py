"""Runs the pipelines of an application: python pipeline_live_run.py APP TRIGGER SETTINGS (JSON)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from smqrt.pipeline import discover, runner
from smqrt.pipeline.runner import RunOptions


def main(app: str, trigger: str, settings: str) -> None:
    folder = Path(app)
    options = RunOptions(
        journal=str(folder / ".journal"),
        app=folder,
        state=folder / ".pipelines",
        master="local[2]",
        trigger=trigger or None,
        settings=json.loads(settings),
    )
    sys.exit(runner.run(discover.load(folder / "pipelines"), [], options))


if __name__ == "__main__":
    main(*sys.argv[1:])
