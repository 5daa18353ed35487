"""`smqrt serve`: finds applications, starts the server, tells what happens, stops at a signal.

A folder, or a ZIP file, with `.preload`, `index.*` or `*.lsp` at its top is one application. Another one holds
applications: each of its sub-folders is one, mounted under its name.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from smqrt.apps.app_spec import AppSpec
from smqrt.cli import without_garbage_collection
from smqrt.errors import PipelineError, SmqrtError, StartError
from smqrt.http.disk import ZipIo
from smqrt.http.resources import IoError
from smqrt.operations.logs import ServerLog
from smqrt.printable import printable
from smqrt.process.environment import cores
from smqrt.server import mako_conf
from smqrt.server.mako_conf import MakoConf
from smqrt.server.ports import lacks_certificate
from smqrt.server.restart.control_socket import ENVIRONMENT as TAKE_OVER
from smqrt.server.startable import acme_files, check_certificate, check_startable
from smqrt.server.supervisor import shared
from smqrt.server.worker import WorkerEnd
from smqrt.settings.settings import FILE_NAME, Settings, table
from smqrt.settings.sources import Sources
from smqrt.settings.tree import Setting, flag
from smqrt.transport.certificates import self_signed_pair
from smqrt.workers.worker_identity import worker_place

if TYPE_CHECKING:
    from smqrt.server.restart.new_process import TakeOver

log = logging.getLogger("smqrt")


class _ZipFolder:
    """A folder in a ZIP file, with the methods of a `Path`; its names are those that the application has."""

    def __init__(self, archive: ZipIo, path: str = "", is_folder: bool = True) -> None:
        self.name = path.rpartition("/")[2]
        self._archive, self._path, self._is_folder = archive, path, is_folder

    def is_dir(self) -> bool:
        """Whether it is a folder."""
        return self._is_folder

    def iterdir(self) -> Iterator[_ZipFolder]:
        """Yield what is in it."""
        for stat in self._archive.files(self._path):
            yield _ZipFolder(self._archive, f"{self._path}/{stat.name}".lstrip("/"), stat.isdir)


_Folder = Path | _ZipFolder

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


def settings_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the flags of all settings, and those that name the files; `sources` reads them."""
    for setting in reversed(table()):
        kind, default = setting.rule.kind, setting.field.default
        command = click.option(
            flag(setting) + (f"/--no-{flag(setting)[2:]}" if kind is bool else ""),
            parameter(setting),
            is_flag=kind is bool,
            default=None,
            metavar=None if kind is bool else _METAVARS.get(kind, "TEXT"),
            show_default=str(default).lower() if default not in (None, "") else False,
            help=setting.help,
        )(command)
    for add in CONFIG_OPTIONS:
        command = add(command)
    return command


CONFIG_OPTIONS = (
    click.option(
        "-c",
        "--mako-conf",
        metavar="FILE",
        help="Read this mako.conf.  [default: mako.conf beside the program, here, or in $HOME, if there is one]",
    ),
    click.option(
        "--config", metavar="FILE", help=f"Read settings from this file.  [default: {FILE_NAME} if there is one]"
    ),
)
"""The options that name the files of settings; `sources` reads them."""
_METAVARS = {int: "INTEGER", float: "FLOAT"}


def parameter(setting: Setting) -> str:
    """Returns the name of the parameter that holds the flag of a setting."""
    return "__".join(setting.path)


def sources(values: Mapping[str, object], words: Sequence[str] = ()) -> tuple[Sources, MakoConf | None]:
    """Returns where settings are to be looked for, and what a mako.conf says.

    Args:
        values: the parameters of a command with `settings_options`, or only with `CONFIG_OPTIONS`.
        words: all words of the command line, for `mako.argv`.

    Raises:
        StartError: a mako.conf can't be read.
    """
    named = values["config"] or (FILE_NAME if Path(FILE_NAME).is_file() else None)
    path = Path(str(values["mako_conf"])) if values["mako_conf"] else mako_conf.find(Path.cwd())
    conf = mako_conf.read(path, words) if path else None
    given = {
        setting.path: setting.rule.from_text(value) if isinstance(value, str) else value
        for setting in table()
        if (value := values.get(parameter(setting))) is not None
    }
    fallback = (conf.settings, str(conf.path)) if conf else ({}, "")
    return Sources(given, os.environ, Path(str(named)) if named else None, *fallback), conf


@click.command(cls=_Serve, epilog=_EXAMPLES)
@click.argument("apps", nargs=-1, metavar="[APP]...")
@click.option(
    "-l", "mounts", multiple=True, metavar="NAME:PRIORITY:PATH", help="Mount an application, as Mako does; repeatable."
)
@click.option("--take-over", is_flag=True, help="Take the place of the server that listens at --restart-socket.")
@settings_options
@click.pass_context
def serve(
    context: click.Context, /, apps: tuple[str, ...], mounts: tuple[str, ...], take_over: bool, **values: Any
) -> None:
    """Run applications: folders or ZIP files with pages, a .preload, or both.

    One APP is the application at /. A folder that holds applications mounts each under its name.
    """
    words: list[str] = context.obj
    worker = WorkerEnd.inherited()
    if worker is None:
        sys.exit(_serve(words, apps, mounts, take_over, values, None))
    try:
        code = _serve(words, apps, mounts, take_over, values, worker)
    except SmqrtError as error:
        worker.failed(str(error))
        code = 1
    worker.close()
    sys.exit(code)


def _serve(
    words: list[str],
    apps: tuple[str, ...],
    mounts: tuple[str, ...],
    take_over: bool,
    values: Mapping[str, object],
    worker: WorkerEnd | None,
) -> int:
    found, conf = sources(values, words)
    configuration = found.read()
    if conf and configuration.places.get(("port",), found.fallback_place) != found.fallback_place:
        conf = replace(conf, plain_http=True)
    settings = shared(_with_certificate(configuration.settings), worker_place())
    when_lost = _WhenLost()
    _guard_outputs(when_lost)
    server_log = ServerLog(settings.log, worker_place().label)
    report = worker.report if worker else server_log.report(_report)
    for warning in configuration.warnings if worker is None else ():
        log.warning("%s", warning)
    specs = discover(apps, mounts, Path.cwd(), conf)
    if worker is None:
        check_startable(settings, conf)
    count = settings.workers or cores()
    if count > 1 and worker is None:
        from smqrt.server.supervisor import Supervisor  # here: one process needs none

        if take_over or TAKE_OVER in os.environ:
            raise StartError("Several workers can't take the place of a server; its own are replaced by smqrt restart.")
        reload_log = partial(_reload_log, server_log, found)
        supervisor = Supervisor(settings, count, conf, report, reload_log)
        _tell_files(configuration.files, conf, specs, report)
        when_lost.stops(supervisor.over.set)
        return supervisor.run()
    with without_garbage_collection():
        from smqrt.server.runtime import Server  # here: the supervisor of workers needs none of it
    place = _place(settings, take_over and worker is None)
    pipelines = _pipeline_command() if settings.pipelines and worker_place().is_first else None
    server = Server(settings, words, report, pipelines, conf, place, worker)
    server.live.read_with(
        lambda: shared(found.read().settings, worker_place()), shared(configuration.settings, worker_place())
    )
    server.live.watch(("log",), lambda found: server_log.apply(found.log))
    if worker is None:
        _tell_files(configuration.files, conf, specs, report)
    when_lost.stops(server.ask_to_stop)
    return server.run(specs)


def _reload_log(server_log: ServerLog, found: Sources) -> None:
    with contextlib.suppress(StartError):  # the workers say it
        server_log.apply(found.read().settings.log)


def _tell_files(
    files: Sequence[Path], conf: MakoConf | None, specs: Sequence[AppSpec], report: Callable[[str], None]
) -> None:
    read = [*files, *([conf.path] if conf else [])]
    for file in read:
        report(f"configuration: {file}")
    for file in _not_read(read, specs):
        log.warning("configuration: %s is not read; --config, or -c for a mako.conf, names another", file)
    if conf and conf.not_honoured:
        log.warning("%s: not used by this server: %s", conf.path, ", ".join(conf.not_honoured))


def _guard_outputs(when_lost: _WhenLost) -> None:
    for fd, name in ((1, "stdout"), (2, "stderr")):
        given = getattr(sys, name)
        file = io.BufferedWriter(_Output(fd, when_lost))
        setattr(sys, name, io.TextIOWrapper(file, given.encoding, given.errors, line_buffering=True))


def _place(settings: Settings, take_over: bool) -> TakeOver | None:
    from smqrt.server.restart.new_process import TakeOver  # here: the supervisor of workers needs none of it

    inherited = TakeOver.inherited()
    if inherited or not take_over:
        return inherited
    if not settings.restart.socket:
        raise StartError("--take-over needs --restart-socket, the one of the server whose place is taken.")
    return TakeOver.of(settings.restart.socket)


def _not_read(read: Sequence[Path], specs: Sequence[AppSpec]) -> list[Path]:
    """The files of settings that somebody may believe to be in force."""
    folders = {Path.cwd(), *(spec.path.absolute() for spec in specs)}
    candidates = {folder / name for folder in folders for name in (FILE_NAME, mako_conf.NAME)}
    return sorted(path for path in candidates - {path.absolute() for path in read} if path.is_file())


class _WhenLost:
    """Stops the server when its output is lost, also when that happened before there was a server to stop."""

    def __init__(self) -> None:
        self._stop: Callable[[], None] | None = None
        self._is_lost = False

    def stops(self, stop: Callable[[], None]) -> None:
        """Call `stop` when the output is lost."""
        self._stop = stop
        if self._is_lost:
            stop()

    def lost(self) -> None:
        """The output is lost."""
        self._is_lost = True
        if self._stop:
            self._stop()


class _Output(io.FileIO):
    """The standard output (`fd` 1) or error output (2); what is written after its reader is gone is dropped.

    The server stops in order, with exit code 0, when the standard output lost its reader, as with `| head -1`, and when
    the terminal was closed: then each write ends with EIO.
    """

    def __init__(self, fd: int, when_lost: _WhenLost) -> None:
        super().__init__(fd, "w", closefd=False)
        self._when_lost = when_lost

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            if error.errno == errno.EIO or self.fileno() == 1:
                self._when_lost.lost()
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
    check_certificate(settings)
    files = acme_files(settings)
    if not lacks_certificate(settings):
        return settings
    try:
        if files is not None:
            files.prepare()
            cert, key = str(files.cert), str(files.key)
        else:
            cert, key = self_signed_pair(settings.host)
    except OSError as error:
        why = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
        raise StartError(f"A self-signed certificate can't be kept: {why}; or give --cert and --key.") from None
    return replace(settings, cert=cert, key=key)


def discover(
    arguments: Sequence[str], mounts: Sequence[str], current: Path, conf: MakoConf | None = None
) -> list[AppSpec]:
    """Returns the applications to load, in order.

    Args:
        arguments: the APP words; one is the root application, several are mounted under their names.
        mounts: the values of `-l`, each `NAME:PRIORITY:PATH` or Mako's short forms of it.
        current: the folder relative paths start at.
        conf: mako.conf, whose applications come last.

    Raises:
        StartError: a path is missing or can't be read, a ZIP file is broken, or two applications have one name.
    """
    specs = [_parse_mount(mount, current) for mount in mounts]
    configured = [AppSpec(app.name, app.path, app.priority, entry=app.entry) for app in conf.apps] if conf else []
    if configured and not arguments:
        pass
    elif not arguments and not mounts:
        preload = current / "app_preload"
        specs += _applications(preload if preload.is_dir() else current, explicit=False)
    elif len(arguments) == 1:
        specs += _applications(current / arguments[0], explicit=True)
    else:
        specs += [_named(current / argument) for argument in arguments]
    specs += configured
    _refuse_doubles(specs)
    return specs


def _parse_mount(text: str, current: Path) -> AppSpec:
    name, _, rest = text.partition(":")
    priority, colon, path = rest.partition(":")
    if not colon or not path:
        raise StartError(
            f"-l {text} must be NAME:PRIORITY:PATH, for example -l chat::apps/chat (an empty NAME is the root)."
        )
    if "/" in name:
        raise StartError(f"-l {text} names the application {name!r}; a name is one path segment and holds no slash.")
    try:
        number = int(priority or "0")
    except ValueError:
        number = 128
    if not -127 <= number <= 127:
        raise StartError(f"-l {text} has the priority {priority!r}; it must be a number from -127 to 127.")
    _open(current / path)
    return AppSpec(name, current / path, number)


def _named(path: Path) -> AppSpec:
    _open(path)
    resolved = path.resolve()
    return AppSpec(resolved.stem if resolved.is_file() else resolved.name, path)


def _applications(path: Path, explicit: bool) -> list[AppSpec]:
    top = _open(path)
    children = sorted((child for child in top.iterdir() if _is_visible_folder(child)), key=lambda child: child.name)
    if _is_application(top) or (explicit and not any(_is_application(child) for child in children)):
        return [AppSpec("", path)]
    if not children:
        raise StartError(
            f"{path} holds no application; give it a .preload or an index.lsp (`smqrt new FOLDER` makes one)."
        )
    return [_child(path, child) for child in children]


def _child(path: Path, child: _Folder) -> AppSpec:
    return AppSpec(child.name, child) if isinstance(child, Path) else AppSpec(child.name, path, inner=child.name)


def _open(path: Path) -> _Folder:
    """Returns the folder, or the top of the ZIP file, after listing it once."""
    try:
        if path.is_dir():
            next(path.iterdir(), None)
            return path
        path.open("rb").close()
        archive = ZipIo(path)
    except FileNotFoundError:
        raise StartError(f"{path} does not exist; an application is a folder or a ZIP file.") from None
    except OSError as error:
        raise StartError(f"{path} can't be read: {error.strerror or error}.") from None
    except IoError as error:
        raise StartError(
            f"{path} is not a readable ZIP file; an application is a folder or a ZIP file ({error})."
        ) from None
    return _ZipFolder(archive)


def _is_visible_folder(child: _Folder) -> bool:
    return child.is_dir() and not child.name.startswith((".", "__"))


def _is_application(folder: _Folder) -> bool:
    try:
        return any(_is_mark(child.name) for child in folder.iterdir())
    except OSError:
        return False


def _is_mark(name: str) -> bool:
    return name in (".preload", ".preload.py") or name.startswith("index.") or name.endswith(".lsp")


def _refuse_doubles(specs: Sequence[AppSpec]) -> None:
    seen: dict[str, Path] = {}
    for spec in specs:
        if spec.name in seen:
            where = f"/{spec.name}/" if spec.name else "/"
            raise StartError(
                f"{seen[spec.name]} and {spec.path} would both be mounted at {where}; use -l NAME:PRIORITY:PATH."
            )
        seen[spec.name] = spec.path
