"""`smqrt new`: a working application to start from."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import click

from smqrt.errors import StartError


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
def new(folder: Path) -> None:
    """Make a new application in FOLDER, which must not exist or be empty."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise StartError(f"{folder} is not empty; name a new folder.")
        with resources.as_file(resources.files("smqrt.cli") / "template") as template:
            for file in sorted(template.iterdir()):
                (folder / file.name).write_bytes(file.read_bytes())
    except OSError as error:
        raise StartError(f"{folder} can't be made: {error.strerror}.") from None
    click.echo(f"Made a working application in {folder}. Start it with: smqrt serve --reload {folder}")
