"""`smqrt config`: current settings and their origin, checks, JSON Schema."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from smqrt.cli.serve import config_options, sources
from smqrt.printable import json_line, printable
from smqrt.server.configuration import check_startable
from smqrt.settings.option_types import schema as schema_of
from smqrt.settings.server_settings import Settings
from smqrt.settings.sources import DEFAULT, FORMER_NAMES, Sources, rows, settings_file


@click.group()
def config() -> None:
    """Show and check the settings of `smqrt serve`."""


@config.command()
@config_options
@click.option("--origin", is_flag=True, help="Add the origin of each value: file, variable, or default.")
@click.option("--changed", is_flag=True, help="Only settings with a value other than the default.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per setting.")
def show(origin: bool, changed: bool, as_json: bool, **files: object) -> None:
    """Print the settings that `smqrt serve` uses in this folder.

    The output is TOML for a smqrt.toml. Secrets are masked.
    """
    configuration = sources(files)[0].read()
    for name, value, place in rows(configuration):
        if changed and place == DEFAULT:
            continue
        if as_json:
            click.echo(json_line({"setting": name, "value": value, "origin": place}))
        else:
            # JSON strings, numbers and lists are valid TOML.
            line = f"# {name} is not set" if value is None else f"{name} = {json.dumps(value, ensure_ascii=False)}"
            click.echo(printable(f"{line:<40} # {place}" if origin else line))
    for warning in configuration.warnings:
        click.echo(printable(warning), err=True)


@config.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
def check(file: Path | None) -> None:
    """Check a settings file and the environment variables SMQRT_...

    FILE is ./smqrt.toml by default. The command makes all checks that `smqrt serve` makes before it opens a port. The
    files that settings name must exist. Exit code 1 when a check fails.
    """
    path = settings_file(file)
    configuration = Sources(environment=os.environ, file=path).read()
    check_startable(configuration.settings)
    for warning in configuration.warnings:
        click.echo(printable(warning), err=True)
    count = len(configuration.places)
    click.echo(printable(f"{path or 'no file'}: {count} setting{'' if count == 1 else 's'}, all checks passed"))


@config.command()
def schema() -> None:
    """Print the JSON Schema of smqrt.toml, for completion in editors.

    Former names of settings are marked as deprecated, with the name that replaces them.
    """
    click.echo(json.dumps(schema_of(Settings, FORMER_NAMES), indent=2))
