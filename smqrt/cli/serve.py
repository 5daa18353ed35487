"""`smqrt serve` and `smqrt demo`: application discovery and server start.

A folder or ZIP file with `.preload`, `index.*` or `*.lsp` at its top is one application. In any other folder, each
sub-folder is an application, mounted under its name.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import smqrt
from smqrt.apps.app_spec import AppSpec
from smqrt.cli import without_garbage_collection
from smqrt.errors import PipelineError, SmqrtError, StartError
from smqrt.http.disk import ZipIo
from smqrt.http.resources import IoError
from smqrt.operations.logs import ServerLog
from smqrt.printable import printable
from smqrt.process.current_process import cores
from smqrt.server import mako_conf
from smqrt.server.configuration import acme_files, check_certificate, check_startable
from smqrt.server.listeners import lacks_certificate
from smqrt.server.mako_conf import MakoConf
from smqrt.server.restart.control_socket import ENVIRONMENT as TAKE_OVER
from smqrt.server.supervisor import Supervisor, worker_settings
from smqrt.server.worker import WorkerEnd
from smqrt.settings.option_types import flag
from smqrt.settings.server_settings import FILE_NAME, Settings, table
from smqrt.settings.sources import FORMER_NAMES, Sources, settings_file
from smqrt.transport.tls_contexts import self_signed_pair
from smqrt.workers.worker_rpc import ENVIRONMENT as WORKER
from smqrt.workers.worker_rpc import worker_place

if TYPE_CHECKING:
    from smqrt.server.restart.new_process import TakeOver

log = logging.getLogger("smqrt")


class _ZipFolder:
    """A folder in a ZIP file, with the methods of `Path` that application discovery uses."""

    def __init__(self, archive: ZipIo, path: str = "", is_folder: bool = True) -> None:
        self.name = path.rpartition("/")[2]
        self._archive, self._path, self._is_folder = archive, path, is_folder

    def is_dir(self) -> bool:
        """Return whether it is a folder."""
        return self._is_folder

    def iterdir(self) -> Iterator[_ZipFolder]:
        """Yield the files and folders in it."""
        for stat in self._archive.files(self._path):
            yield _ZipFolder(self._archive, f"{self._path}/{stat.name}".lstrip("/"), stat.isdir)


_Folder = Path | _ZipFolder

_EXAMPLES = """\b
Examples:
  smqrt serve                      the applications in ./app_preload, or here
  smqrt serve chat                 one application, at /
  smqrt serve chat led.zip         two applications, at /chat/ and /led/
  smqrt serve -l ::site -l api:5:api --tls-port 9443
  smqrt serve chat -- word word    pass words to the application (mako.argv)
"""


COMMON_OPTIONS = (
    "mounts", "mqtt", "config", "host", "port", "tls_port", "cert", "key", "tls__acme", "hosts", "origins",
    "proxy__trusted", "workers", "reload", "debug", "pipelines", "auth__users", "auth__acl", "admin__port",
    "log__level",
)  # fmt: skip
"""Parameters of the options that `smqrt serve --help` shows."""


class _Serve(click.Command):
    """Passes the words after `--` to the applications, and shows the common options or all in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the common options; after `--help-all` the others too, in the groups of the settings."""
        records = {
            "help" if "--help" in one.opts else one.name or "": record
            for one in self.get_params(ctx)
            if isinstance(one, click.Option) and (record := one.get_help_record(ctx))
        }
        with formatter.section("Options"):
            formatter.write_dl([records.pop(name) for name in (*COMMON_OPTIONS, "help_all", "help")])
        if not ctx.meta.get(_HELP_ALL):
            return
        titles = {item.name: _without_links(item.metadata["help"]) for item in fields(Settings) if item.metadata}
        groups: dict[str, list[tuple[str, str]]] = {}
        for name, record in records.items():
            group, inner, _ = name.partition("__")
            groups.setdefault(f"{group}: {titles[group]}" if inner else "Other options", []).append(record)
        for title, members in groups.items():
            with formatter.section(title.removesuffix(".")):
                formatter.write_dl(members)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        ctx.obj = args[:end] + args[end + 1 :]  # all words, for `mako.argv`
        return super().parse_args(ctx, _with_mqtt_hub(args[:end]))


_HELP_ALL = "smqrt.help_all"  # in the context: all options are shown


def _help_all(context: click.Context, _: click.Parameter, is_given: bool) -> None:
    if is_given:
        context.meta[_HELP_ALL] = True
        click.echo(context.get_help(), color=context.color)
        context.exit()


def _without_links(text: str) -> str:
    """Return a help text without its links, which are for the manual."""
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text)


def _with_mqtt_hub(args: list[str]) -> list[str]:
    """Give `--mqtt` its value: the name of a hub, unless the next word is an application."""
    if "--mqtt" not in args:
        return args
    at = args.index("--mqtt")
    has_name = at + 1 < len(args) and not args[at + 1].startswith("-") and not Path(args[at + 1]).exists()
    return [*args[:at], f"--mqtt={args[at + 1] if has_name else '*'}", *args[at + 1 + has_name :]]


def settings_options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator: add an option for each setting, and `config_options`; `sources` evaluates their values."""
    for setting in reversed(table()):
        kind, default = setting.rule.kind, setting.field.default
        text = _without_links(setting.help)
        if default not in (None, "", ()):
            shown = ",".join(default) if isinstance(default, tuple) else str(default).lower()
            text += f"  [default: {shown}]"
        command = click.option(
            flag(setting.path) + (f"/--no-{flag(setting.path)[2:]}" if kind is bool else ""),
            parameter(setting.path),
            is_flag=kind is bool,
            default=None,
            metavar=None if kind is bool else _METAVARS.get(kind, "TEXT"),
            help=text,
        )(command)
    for former in FORMER_NAMES:  # accepted for one release
        command = click.option(flag(former), parameter(former), hidden=True)(command)
    return config_options(command)


def config_options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator: add the options that name configuration files."""
    mako_help = "A mako.conf to read.  [default: mako.conf beside the program, here, or in $HOME, if it exists]"
    command = click.option("-c", "--mako-conf", metavar="FILE", help=mako_help)(command)
    help_text = f"Settings file.  [default: {FILE_NAME} if it exists]"
    return click.option("--config", metavar="FILE", help=help_text)(command)


_METAVARS = {int: "INTEGER", float: "FLOAT"}  # the options have no click types: `sources` parses the values


def parameter(path: tuple[str, ...]) -> str:
    """Return the parameter name of a setting's option."""
    return "__".join(path)


def sources(values: Mapping[str, object], words: Sequence[str] = ()) -> tuple[Sources, MakoConf | None]:
    """Return the sources of settings, and the content of the mako.conf.

    Args:
        values: the parameters of a command with `settings_options`, or only with `config_options`.
        words: all words of the command line, for `mako.argv`.

    Raises:
        StartError: a mako.conf can't be read.
    """
    path = Path(str(values["mako_conf"])) if values["mako_conf"] else mako_conf.find(Path.cwd())
    conf = mako_conf.read(path, words) if path else None
    rules = {setting.path: setting.rule for setting in table()}
    rules |= {former: rules[current] for former, current in FORMER_NAMES.items()}
    given = {
        path: rule.from_text(value) if isinstance(value, str) else value
        for path, rule in rules.items()
        if (value := values.get(parameter(path))) is not None
    }
    fallback = (conf.settings, str(conf.path)) if conf else ({}, "")
    return Sources(given, os.environ, settings_file(str(values["config"] or "")), *fallback), conf


@click.command(cls=_Serve, epilog=_EXAMPLES)
@click.argument("apps", nargs=-1, metavar="[APP]...")
@click.option(
    "-l",
    "mounts",
    multiple=True,
    metavar="NAME:PRIORITY:PATH",
    help="Mount an application, with the syntax of Mako; repeatable.",
)
@click.option(
    "--mqtt",
    metavar="[HUB]",
    help="Accept MQTT clients at the hub with this name, else at one with the option mqtt, or the first: `mqtt.hub`.",
)
@click.option("--take-over", is_flag=True, help="Take over from the running server at --restart-socket (hot restart).")
@click.option(
    "--help-all", is_flag=True, is_eager=True, expose_value=False, callback=_help_all, help="Show all options and exit."
)
@settings_options
@click.pass_context
def serve(
    context: click.Context,
    /,
    apps: tuple[str, ...],
    mounts: tuple[str, ...],
    mqtt: str | None,
    take_over: bool,
    **values: Any,
) -> None:
    """Start a server and run applications.

    APP is a folder or ZIP file with pages, a .preload, or both. A single APP is mounted at /, several are mounted under
    their names. When APP is a folder of applications, each is mounted under its name.

    Every setting has an option: --help-all lists them, `smqrt help settings` describes them.
    """
    words: list[str] = context.obj
    if mqtt is not None:
        values[parameter(("mqtt", "hub"))] = mqtt
    worker = WorkerEnd.inherited()
    try:
        code = _serve(worker, words, apps, mounts, take_over, values)
    except SmqrtError as error:
        if worker is None:
            raise
        worker.failed(str(error))  # the supervisor prints the error
        code = 1
    if worker is not None:
        worker.close()
    sys.exit(code)


def _serve(
    worker: WorkerEnd | None, words: list[str], apps: Sequence[str], mounts: Sequence[str], take_over: bool, values: Any
) -> int:
    """Run a supervisor or a server until the shutdown, and return the exit code."""
    settings_sources, conf = sources(values, words)
    configuration = settings_sources.read()
    if conf and configuration.places.get(("port",), settings_sources.fallback_place) != settings_sources.fallback_place:
        conf = replace(conf, plain_http=True)  # another source than mako.conf sets the port
    settings = worker_settings(_with_certificate(configuration.settings), worker_place())
    output_loss = _guard_outputs()
    server_log = ServerLog(settings.log, worker_place().label)
    report = worker.report if worker else server_log.report(lambda line: click.echo(printable(line)))
    for warning in configuration.warnings if worker is None else ():
        log.warning("%s", warning)
    specs = discover(apps, mounts, Path.cwd(), conf, is_required=not settings.mqtt.hub)
    if worker is None:
        check_startable(settings, conf)
    if worker is None and (count := settings.workers or cores()) > 1:
        if take_over or TAKE_OVER in os.environ:
            raise StartError("--take-over is for a single process. Replace workers with smqrt restart.")

        def reload_log() -> None:
            with contextlib.suppress(StartError):  # the workers report it
                server_log.apply(settings_sources.read().settings.log)

        supervisor = Supervisor(settings, count, conf, report, reload_log)
        run, stop = supervisor.run, supervisor.stopping.set
    else:
        with without_garbage_collection():
            from smqrt.server.runtime import Server  # slow to import, and the supervisor does not need it
        old_process = _old_process(settings.restart.socket if take_over and worker is None else None)
        pipelines = _pipeline_command() if settings.pipelines and worker_place().is_first else None
        server = Server(settings, words, report, pipelines, conf, old_process, worker)
        initial = worker_settings(configuration.settings, worker_place())
        server.live.read_with(lambda: worker_settings(settings_sources.read().settings, worker_place()), initial)
        server.live.watch(("log",), lambda changed: server_log.apply(changed.log))
        run, stop = partial(server.run, specs), server.ask_to_stop
    if worker is None:
        _report_files(configuration.files, conf, specs, report)
    output_loss.on_loss(stop)
    return run()


def _old_process(control_socket: str | None) -> TakeOver | None:
    """Return the process to take over from: the one that started this process, else the one at a control socket.

    Args:
        control_socket: path of the control socket, with --take-over; otherwise None.

    Raises:
        StartError: the path is empty, or no server responds there.
    """
    with without_garbage_collection():
        from smqrt.server.restart.new_process import TakeOver

    inherited = TakeOver.inherited()
    if inherited is not None or control_socket is None:
        return inherited
    if not control_socket:
        raise StartError("--take-over requires --restart-socket, the control socket of the running server.")
    return TakeOver.of(control_socket)


def _report_files(
    files: Sequence[Path], conf: MakoConf | None, specs: Sequence[AppSpec], report: Callable[[str], None]
) -> None:
    """Report the configuration files, and warn about files of the same names that are not read."""
    read = [*files, *([conf.path] if conf else [])]
    for file in read:
        report(f"configuration: {file}")
    # Users may expect that a configuration file beside an application is read.
    folders = {Path.cwd(), *(spec.path.absolute() for spec in specs)}
    candidates = {folder / name for folder in folders for name in (FILE_NAME, mako_conf.NAME)}
    for file in sorted(path for path in candidates - {path.absolute() for path in read} if path.is_file()):
        log.warning("configuration: %s is not read; select it with --config, or -c for a mako.conf", file)
    if conf is None:
        return
    if conf.unsupported:
        log.warning("%s: not used by this server: %s", conf.path, ", ".join(conf.unsupported))
    for name, near in conf.misspelled.items():
        log.warning("%s: %s is not a variable of the server; did you mean %s?", conf.path, name, near)


def _guard_outputs() -> _OutputLoss:
    """Replace standard output and standard error with files that report when the program that reads them has exited."""
    output_loss = _OutputLoss()
    for fd, name in ((1, "stdout"), (2, "stderr")):
        original = getattr(sys, name)
        file = io.BufferedWriter(_Output(fd, output_loss))
        setattr(sys, name, io.TextIOWrapper(file, original.encoding, original.errors, line_buffering=True))
    return output_loss


class _OutputLoss:
    """Stops the server when the output is lost, also when that happens before the server exists."""

    def __init__(self) -> None:
        self._stop: Callable[[], None] | None = None
        self._is_lost = False

    def on_loss(self, stop: Callable[[], None]) -> None:
        """Call `stop` when the output is lost; at once when it is lost already."""
        self._stop = stop
        if self._is_lost:
            stop()

    def lost(self) -> None:
        """Record the loss, and stop the server."""
        self._is_lost = True
        if self._stop:
            self._stop()


class _Output(io.FileIO):
    """Standard output (`fd` 1) or standard error (2); discards output that no program reads.

    The server shuts down with exit code 0 when the program that reads standard output exits, as with `| head -1`, and
    when the terminal is closed: writes then fail with EIO.
    """

    def __init__(self, fd: int, output_loss: _OutputLoss) -> None:
        super().__init__(fd, "w", closefd=False)
        self._output_loss = output_loss

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())  # later writes succeed
            os.close(null)
            if error.errno == errno.EIO or self.fileno() == 1:
                self._output_loss.lost()
            return len(data)


def _pipeline_command() -> list[str] | None:
    """Return the command that runs the pipelines of an application; None, after a message, when Spark is missing."""
    from smqrt.pipeline import doctor, jvm

    checks = doctor.package("pyspark", *doctor.PYSPARK), doctor.package("pyarrow", *doctor.PYARROW)
    faults = [f"{check.name}: {check.detail}; {check.remedy}" for check in checks if not check.ok]
    try:
        jvm.find_java()
    except PipelineError as error:
        faults.append(str(error))
    if faults:
        click.echo(f"pipelines: disabled: {faults[0]}")
        return None
    return [sys.executable, "-m", "smqrt", "pipeline", "run", "--app"]


def _with_certificate(settings: Settings) -> Settings:
    """Return the settings with the files of a certificate, which is created if a TLS port has none."""
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
        reason = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
        raise StartError(
            f"Cannot save a self-signed certificate: {reason}. Fix this, or pass --cert and --key."
        ) from None
    return replace(settings, cert=cert, key=key)


def discover(
    arguments: Sequence[str],
    mounts: Sequence[str],
    current: Path,
    conf: MakoConf | None = None,
    is_required: bool = True,
) -> list[AppSpec]:
    """Return the applications to load, in order.

    Args:
        arguments: the APP arguments; one is the root application, several are mounted under their names.
        mounts: the values of `-l`, each `NAME:PRIORITY:PATH` or one of Mako's short forms.
        current: the base of relative paths.
        conf: the mako.conf, whose applications come last.
        is_required: whether the server needs an application; it does not as a mere MQTT broker.

    Raises:
        StartError: a path is missing or can't be read, a ZIP file is damaged, or two applications have the same name.
    """
    specs = [_parse_mount(mount, current) for mount in mounts]
    configured = [AppSpec(app.name, app.path, app.priority, entry=app.entry) for app in conf.apps] if conf else []
    if not arguments:
        if not mounts and not configured:
            preload = current / "app_preload"
            try:
                specs += _applications(preload if preload.is_dir() else current, explicit=False)
            except StartError:
                if is_required:
                    raise
    elif len(arguments) == 1:
        specs += _applications(current / arguments[0], explicit=True)
    else:
        for path in (current / argument for argument in arguments):
            _open(path)
            resolved = path.resolve()
            specs.append(AppSpec(resolved.stem if resolved.is_file() else resolved.name, path))
    specs += configured
    seen: dict[str, Path] = {}
    for spec in specs:
        if spec.name in seen:
            url_path = f"/{spec.name}/" if spec.name else "/"
            raise StartError(
                f"{seen[spec.name]} and {spec.path} have the same path {url_path}. Use -l NAME:PRIORITY:PATH."
            )
        seen[spec.name] = spec.path
    return specs


def _parse_mount(text: str, current: Path) -> AppSpec:
    name, _, rest = text.partition(":")
    priority, colon, path = rest.partition(":")
    if not colon or not path:
        raise StartError(
            f"-l {text}: not NAME:PRIORITY:PATH. Example: -l chat::apps/chat (with an empty NAME for the root)."
        )
    if "/" in name:
        raise StartError(f"-l {text}: the name {name!r} contains a slash. A name is one path segment.")
    try:
        number = int(priority or "0")
    except ValueError:
        number = 128  # out of range
    if not -127 <= number <= 127:
        raise StartError(f"-l {text}: the priority {priority!r} is not a number from -127 to 127.")
    _open(current / path)
    return AppSpec(name, current / path, number)


def _applications(path: Path, explicit: bool) -> list[AppSpec]:
    """Return the application in a folder or ZIP file, or the applications in its sub-folders.

    Args:
        explicit: whether the path is an argument; a folder without applications is then itself an application.
    """
    top = _open(path)
    visible = (child for child in top.iterdir() if child.is_dir() and not child.name.startswith((".", "__")))
    children = sorted(visible, key=lambda child: child.name)
    if _is_application(top) or (explicit and not any(_is_application(child) for child in children)):
        return [AppSpec("", path)]
    if not children:
        raise StartError(
            f"no application in {path}. Add a .preload or an index.lsp (`smqrt new FOLDER` creates an application)."
        )
    return [
        AppSpec(child.name, child) if isinstance(child, Path) else AppSpec(child.name, path, inner=child.name)
        for child in children
    ]


def _open(path: Path) -> _Folder:
    """Return the folder, or the top of the ZIP file, after checking that it is readable."""
    try:
        if path.is_dir():
            next(path.iterdir(), None)
            return path
        path.open("rb").close()
        archive = ZipIo(path)
    except FileNotFoundError:
        raise StartError(f"{path} does not exist. An application is a folder or a ZIP file.") from None
    except OSError as error:
        raise StartError(f"Cannot read {path}: {error.strerror or error}.") from None
    except IoError as error:
        raise StartError(f"{path} is neither a folder nor a readable ZIP file ({error}).") from None
    return _ZipFolder(archive)


def _is_application(folder: _Folder) -> bool:
    try:
        names = [child.name for child in folder.iterdir()]
    except OSError:
        return False
    marks = (".preload", ".preload.py")
    return any(name in marks or name.startswith("index.") or name.endswith(".lsp") for name in names)


# ---- `smqrt demo`

_COPY_VARIABLE = "_SMQRT_DEMO"  # environment variable with the folder of the copy, for the workers
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
    with contextlib.ExitStack() as cleanup:
        if WORKER in os.environ:  # the supervisor of this worker has created the copy, and removes it
            folder = Path(os.environ[_COPY_VARIABLE])
        elif keep is not None:
            if keep.exists():
                raise StartError(f"{keep} exists. Serve it with: smqrt serve {keep}")
            shutil.copytree(demonstrations(), keep, ignore=_NOT_COPIED)
            folder = keep
        else:
            folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="smqrt-demo-"))) / "app_preload"
            shutil.copytree(demonstrations(), folder, ignore=_NOT_COPIED)
        os.environ[_COPY_VARIABLE] = str(folder.absolute())
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
