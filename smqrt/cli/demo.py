"""`smqrt demo`: a server for a copy of the demonstration applications."""

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
"""Environment variable with the folder of the copy, for the workers of the server."""
_NOT_COPIED = shutil.ignore_patterns(".journal", ".pipelines", "__pycache__")


@click.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "--keep", metavar="FOLDER", type=click.Path(path_type=Path), help="Copy to this folder and keep it after shutdown."
)
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[SERVE_OPTIONS]...")
def demo(keep: Path | None, options: tuple[str, ...]) -> None:
    """Start a server with the demonstration applications.

    SERVE_OPTIONS are options of `smqrt serve`, such as --port 8080. The server uses a temporary copy of the
    applications. With --keep the copy is permanent: edit it and serve it again.
    """
    from smqrt.cli.serve import serve

    with _application_copy(keep) as folder:
        os.environ[_COPY] = str(folder.absolute())
        serve.main([str(folder), *options], prog_name="smqrt demo", standalone_mode=False)


def demonstrations() -> Path:
    """Return the folder of the demonstration applications: in the package, or beside it in a checkout.

    Raises:
        StartError: this installation does not include them.
    """
    package = Path(smqrt.__file__).parent
    for folder in (package / "demonstrations", package.parent / "app_preload"):
        if folder.is_dir():
            return folder
    raise StartError("This installation of smqrt does not include the demonstration applications.")


@contextmanager
def _application_copy(keep: Path | None) -> Iterator[Path]:
    if WORKER in os.environ:  # the supervisor of this worker has made the copy, and removes it
        yield Path(os.environ[_COPY])
    elif keep is not None:
        if keep.exists():
            raise StartError(f"{keep} exists. Serve it with: smqrt serve {keep}")
        shutil.copytree(demonstrations(), keep, ignore=_NOT_COPIED)
        yield keep
    else:
        with tempfile.TemporaryDirectory(prefix="smqrt-demo-") as temporary:
            folder = Path(temporary) / "app_preload"
            shutil.copytree(demonstrations(), folder, ignore=_NOT_COPIED)
            yield folder
