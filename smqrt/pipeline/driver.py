"""What a cluster runs: the arguments of `smqrt pipeline submit` again, and the pipelines out of the archive it made."""

from __future__ import annotations

import argparse
import sys
import tempfile
import zipfile
from pathlib import Path

from smqrt.errors import SmqrtError
from smqrt.journal import uris
from smqrt.pipeline.submit import TOKEN_CONF

_APP = "smqrt_app/"


def main(arguments: list[str] | None = None) -> None:
    """Runs the pipelines under spark-submit, and ends the process with the exit code.

    Args:
        arguments: those of `driver.py`; the process's own when not given.
    """
    given = _parser().parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as folder:
            sys.exit(_run(given, Path(given.app) if given.app else unpack(sys.path, Path(folder))))
    except SmqrtError as error:
        sys.exit(f"Error: {error}")


def unpack(path: list[str], folder: Path) -> Path:
    """Takes the application's pipelines out of the archive that spark-submit has put on the path.

    Args:
        path: where modules are looked for.
        folder: where the pipelines go.

    Returns:
        The application's folder.
    """
    for entry in path:
        if zipfile.is_zipfile(entry):
            with zipfile.ZipFile(entry) as archive:
                archive.extractall(folder, [name for name in archive.namelist() if name.startswith(_APP)])
    return folder / _APP


def _run(given: argparse.Namespace, app: Path) -> int:
    from smqrt.pipeline.discover import load
    from smqrt.pipeline.runner import RunOptions, run

    options = RunOptions(
        journal=given.journal,
        app=app,
        state=uris.state(given.state),
        master="",
        start=given.start,
        once=given.once,
        republish=given.republish,
        token=_token(),
        cafile=str(app / given.cafile) if given.cafile else None,
        tables=given.tables,
    )
    return run(load(app / "pipelines"), given.names, options)


def _token() -> str | None:
    from pyspark import SparkConf

    from smqrt.pipeline import jvm

    jvm.start()
    return SparkConf().get(TOKEN_CONF, None)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("driver.py")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--app")
    parser.add_argument("--journal", required=True)
    parser.add_argument("--state", required=True)
    parser.add_argument("--cafile")
    parser.add_argument("--tables")
    parser.add_argument("--from", dest="start", default="latest")
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--republish", action="store_true")
    return parser
