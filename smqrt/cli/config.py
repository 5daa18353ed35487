"""`smqrt config`: what the settings are and where they come from, whether a file is right, its JSON Schema."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import click

from smqrt.cli.serve import CONFIG_OPTIONS, sources
from smqrt.printable import json_line, printable
from smqrt.server.startable import check_startable
from smqrt.settings.settings import FILE_NAME, Settings
from smqrt.settings.sources import DEFAULT, Configuration, Sources, rows
from smqrt.settings.tree import schema as schema_of


@click.group()
def config() -> None:
    """Show and check the settings of `smqrt serve`."""


def _options(command: Callable[..., None]) -> Callable[..., None]:
    for add in CONFIG_OPTIONS:
        command = add(command)
    return command


@config.command()
@_options
@click.option("--origin", is_flag=True, help="Add where each value comes from.")
@click.option("--changed", is_flag=True, help="Only what is not the default.")
@click.option("--json", "as_json", is_flag=True, help="For programs: a line of JSON for each setting.")
def show(origin: bool, changed: bool, as_json: bool, **files: object) -> None:
    """Print every setting as `smqrt serve` would have it in this folder; secrets are masked.

    The lines are TOML, and do for a smqrt.toml.
    """
    found = sources(files)[0].read()
    for name, value, place in rows(found):
        if changed and place == DEFAULT:
            continue
        if as_json:
            click.echo(json_line({"setting": name, "value": value, "origin": place}))
        else:
            line = _toml(name, value)
            click.echo(printable(f"{line:<40} # {place}" if origin else line))
    for warning in found.warnings:
        click.echo(printable(warning), err=True)


def _toml(name: str, value: object) -> str:
    return f"# {name} is not given" if value is None else f"{name} = {json.dumps(value, ensure_ascii=False)}"


@config.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
def check(file: Path | None) -> None:
    """Tell what is wrong with FILE, ./smqrt.toml by default, and with the variables SMQRT_...

    Everything is checked that `smqrt serve` checks before it opens a port: also the files that settings name, which
    must be there. Exit code 1 when something is wrong.
    """
    path = file or (Path(FILE_NAME) if Path(FILE_NAME).is_file() else None)
    found = Sources(environment=os.environ, file=path).read()
    check_startable(found.settings)
    for warning in found.warnings:
        click.echo(printable(warning), err=True)
    click.echo(printable(_summary(path, found)))


def _summary(path: Path | None, found: Configuration) -> str:
    count = len(found.places)
    return f"{path or 'no file'}: {count} setting{'' if count == 1 else 's'} given, nothing wrong"


@config.command()
def schema() -> None:
    """Print the JSON Schema of smqrt.toml, for editors."""
    click.echo(json.dumps(schema_of(Settings), indent=2))
