"""`smqrt demo`: the demonstration applications, which are in the package, served from a copy of them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

import smqrt
from smqrt.errors import StartError
from smqrt.workers.worker_identity import ENVIRONMENT as WORKER

_COPY = "_SMQRT_DEMO"
"""Where the workers of a server find its copy."""
_NOT_COPIED = shutil.ignore_patterns(".journal", ".pipelines", "__pycache__")


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--keep", metavar="FOLDER", type=click.Path(path_type=Path), help="Keep the applications in this folder.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def demo(keep: Path | None, options: tuple[str, ...]) -> None:
    """Serve the demonstration applications. OPTIONS are those of `smqrt serve`, such as --port 8080.

    They are served from a copy, which goes when the server ends; with --keep it stays, to be changed and served again.
    """
    from smqrt.cli.serve import serve

    with _copied(keep) as folder:
        serve.main([str(folder), *options], prog_name="smqrt demo", standalone_mode=False)


def demonstrations() -> Path:
    """Returns the folder of the demonstration applications: in the package, or beside it in a checkout.

    Raises:
        StartError: they were left out of this installation.
    """
    package = Path(smqrt.__file__).parent
    for folder in (package / "demonstrations", package.parent / "app_preload"):
        if folder.is_dir():
            return folder
    raise StartError("The demonstration applications were left out of this installation of smqrt.")


@contextmanager
def _copied(keep: Path | None) -> Iterator[Path]:
    if WORKER in os.environ:  # of the supervisor that has made the copy
        yield Path(os.environ[_COPY])
        return
    with _copy(keep) as folder:
        os.environ[_COPY] = str(folder.absolute())
        yield folder


@contextmanager
def _copy(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        if keep.exists():
            raise StartError(f"{keep} exists; serve it with: smqrt serve {keep}")
        shutil.copytree(demonstrations(), keep, ignore=_NOT_COPIED)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="smqrt-demo-") as temporary:
        folder = Path(temporary) / "app_preload"
        shutil.copytree(demonstrations(), folder, ignore=_NOT_COPIED)
        yield folder
