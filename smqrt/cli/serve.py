"""`smqrt serve`: finds applications, starts the server, tells what happens, stops at a signal."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from smqrt.cli.discover import discover
from smqrt.errors import PipelineError, StartError
from smqrt.net.selfsigned import self_signed_pair
from smqrt.printable import printable
from smqrt.runtime import Server
from smqrt.settings import FILE_NAME, Settings, environment_name, flag, load_file, table

_EXAMPLES = """\b
Examples:
  smqrt serve                      ./app_preload, else the current folder
  smqrt serve chat                 one application, at /
  smqrt serve chat led.zip         two, at /chat/ and /led/
  smqrt serve -l ::site -l api:5:api --tls-port 9443
  smqrt serve chat -- word word    words for the application (mako.argv)
"""


class _Serve(click.Command):
    """Keeps the words after `--` for the applications."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        ctx.obj = args[:end] + args[end + 1 :]
        return super().parse_args(ctx, args[:end])


def _read_config(ctx: click.Context, _: click.Parameter, value: str | None) -> None:
    path = Path(value or FILE_NAME)
    if value or path.is_file():
        ctx.default_map = load_file(path)


def _settings(command: Callable[..., None]) -> Callable[..., None]:
    """Adds one option per setting."""
    for setting in reversed(table()):
        kind = setting.metadata["rule"].kind
        either = f"/--no-{flag(setting)[2:]}" if kind is bool and setting.default is None else ""
        add = click.option(
            flag(setting) + either,
            setting.name,
            envvar=environment_name(setting),
            type=kind,
            is_flag=kind is bool,
            default=setting.default,
            show_default=setting.default is not None,
            help=setting.metadata["help"],
        )
        command = add(command)
    return command


@click.command(cls=_Serve, epilog=_EXAMPLES)
@click.argument("apps", nargs=-1, metavar="[APP]...")
@click.option(
    "-l", "mounts", multiple=True, metavar="NAME:PRIORITY:PATH", help="Mount an application, as Mako does; repeatable."
)
@click.option(
    "--config",
    is_eager=True,
    expose_value=False,
    callback=_read_config,
    metavar="FILE",
    help=f"Read settings from this file.  [default: {FILE_NAME} if there is one]",
)
@_settings
@click.pass_obj
def serve(words: list[str], /, apps: tuple[str, ...], mounts: tuple[str, ...], **values: Any) -> None:
    """Run applications: folders or ZIP files with pages, a .preload, or both.

    One APP is the application at /. A folder that holds applications mounts each under its name.
    """
    settings = _with_certificate(Settings(**values))
    specs = discover(apps, mounts, Path.cwd())
    server = Server(settings, words, _report, _pipeline_command() if settings.pipelines else None)
    raw = _UntilReaderLeaves(server.ask_to_stop)
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), sys.stdout.encoding, sys.stdout.errors, line_buffering=True)
    sys.exit(server.run(specs))


class _UntilReaderLeaves(io.FileIO):
    """The standard output. When its reader goes away, as `head` does, the server stops in order, without a word."""

    def __init__(self, stop: Callable[[], None]) -> None:
        super().__init__(1, "w", closefd=False)
        self._stop = stop

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            self._stop()
            return len(data)


def _report(line: str) -> None:
    click.echo(printable(line))


def _pipeline_command() -> list[str] | None:
    """What runs the pipelines of an application; None, and a line that says why, when nothing can."""
    from smqrt.pipeline import doctor, jvm

    checks = doctor.package("pyspark", *doctor.PYSPARK), doctor.package("pyarrow", *doctor.PYARROW)
    troubles = [f"{check.name}: {check.detail}; {check.remedy}" for check in checks if not check.ok]
    try:
        jvm.find_java()
    except PipelineError as error:
        troubles.append(str(error))
    if troubles:
        click.echo(f"pipelines: none are run: {troubles[0]}")
        return None
    return [sys.executable, "-m", "smqrt", "pipeline", "run", "--app"]


def _with_certificate(settings: Settings) -> Settings:
    if bool(settings.cert) != bool(settings.key):
        given, missing = ("--cert", "--key") if settings.cert else ("--key", "--cert")
        raise StartError(f"{given} needs {missing} too; a certificate and its private key belong together.")
    if settings.tls_port is None:
        return settings
    if settings.cert:
        return settings
    try:
        cert, key = self_signed_pair(settings.host)
    except OSError as error:
        raise StartError(f"A self-signed certificate can't be kept: {error}; give --cert and --key.") from None
    return replace(settings, cert=cert, key=key)
