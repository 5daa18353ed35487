"""`smqrt pipeline`: make, run and look after the pipelines of an application."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.console import Console

from smqrt.cli.pipeline_progress import shown, watching
from smqrt.cli.pipeline_table import table
from smqrt.errors import PipelineError
from smqrt.pipeline import process
from smqrt.pipeline.status import Status, read, read_all

if TYPE_CHECKING:
    from smqrt.pipeline.discover import Catalog
    from smqrt.pipeline.runner import RunOptions

_Command = TypeVar("_Command", bound=Callable[..., Any])
_TOKEN_VARIABLE = "SMQRT_JOURNAL_TOKEN"
_FROM = "Where queries begin that never ran: earliest, latest, 2h (so long ago), an ISO time or a sequence number."
_MODE = "Where the driver runs: here, or in the cluster."
_HUB_RETRY = "Seconds that a micro-batch waits for a hub that is away."


@dataclass(frozen=True)
class Places:
    """Where an application's pipelines and what belongs to them are.

    Attributes:
        app: its folder; state: folder of the state of its queries; journal: path or URL; token: for the hub.
    """

    app: Path
    state: Path
    journal: str
    token: str | None

    @property
    def pipelines(self) -> Path:
        """The folder of pipeline files."""
        return self.app / "pipelines"

    def catalog(self) -> Catalog:
        """What the folder declares."""
        from smqrt.pipeline.discover import load

        return load(self.pipelines)

    def options(self, **more: Any) -> RunOptions:
        """How to run pipelines here; `more` are further fields of RunOptions."""
        from smqrt.pipeline.runner import RunOptions

        return RunOptions(self.journal, self.app, self.state, token=self.token, **more)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def pipeline() -> None:
    """Compute on what flows through a hub, with Spark: `smqrt help pipelines` is the beginning."""


def _places(*, journal: bool = False) -> Callable[[_Command], _Command]:
    """Adds the options that say where things are, and gives the command `places`."""
    options = [
        click.option(
            "--app",
            type=click.Path(exists=True, file_okay=False, path_type=Path),
            default=".",
            show_default="the current folder",
            help="The application's folder.",
        ),
        click.option(
            "--state",
            type=click.Path(file_okay=False, path_type=Path),
            show_default=".pipelines in it",
            help="Folder of checkpoints and status.",
        ),
    ]
    if journal:
        options += [
            click.option(
                "--journal",
                metavar="PATH|URL",
                show_default=".journal in it",
                help="The journal: its folder, or the URL under which a hub serves it.",
            ),
            click.option(
                "--token",
                envvar=_TOKEN_VARIABLE,
                help=f"What the hub asks for; also in the variable {_TOKEN_VARIABLE}.",
                show_default="the one in the journal's folder",
            ),
        ]

    def add(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def _at(app: Path, state: Path | None, journal: str | None = None, token: str | None = None) -> Places:
    app = app.absolute()
    return Places(app, (state or app / ".pipelines").absolute(), journal or str(app / ".journal"), token)


_names = click.argument("names", nargs=-1, metavar="[NAME]...")


def _start(command: _Command) -> _Command:
    """Adds the options that say where new queries begin and how they go on."""
    for option in (
        click.option(
            "--republish", is_flag=True, help="Also publish results of what was there before the first start."
        ),
        click.option("--once", is_flag=True, help="Work off what there is, then end."),
        click.option("--from", "start", metavar="TIME", default="latest", show_default=True, help=_FROM),
    ):
        command = option(command)
    return command


class _Submit(click.Command):
    """Keeps the words after `--` for spark-submit."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        ctx.obj = args[end + 1 :]
        return super().parse_args(ctx, args[:end])


@pipeline.command()
@click.argument("name")
@_places()
def init(name: str, app: Path, state: Path | None) -> None:
    """Make a pipeline NAME to start from, with rows to test it on."""
    from smqrt.pipeline import initial

    places = _at(app, state)
    for path in initial.make(places.pipelines, name):
        click.echo(f"Made {path}")
    where = "" if app == Path() else f" --app {app}"
    click.echo(f"Try it with: smqrt pipeline test{where}; run it with: smqrt pipeline run {name}{where}")


@pipeline.command("list")
@_places()
def list_(app: Path, state: Path | None) -> None:
    """Print the queries, what each does with its rows, and where it is written."""
    places = _at(app, state)
    rows = []
    for query in places.catalog().queries():
        status = read(places.state / query.name)
        target = query.options.get("to") or query.options.get("path") or ""
        rows.append((query.name, query.kind, str(target), status.state if status else "never ran", query.where))
    for row in _aligned(rows):
        click.echo(row)


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


@pipeline.command()
@_names
@_places(journal=True)
@click.option("--master", default="local[*]", show_default=True, help="Where Spark computes; for clusters see submit.")
@_start
@click.option("--trigger", metavar="DURATION", help="Shortest time between micro-batches, instead of what files say.")
@click.option("--hub-retry", "hub_retry_s", type=float, default=60.0, show_default=True, help=_HUB_RETRY)
def run(
    names: tuple[str, ...], app: Path, state: Path | None, journal: str | None, token: str | None, **options: Any
) -> None:
    """Run the queries NAME, or all of them, until Ctrl-C or `smqrt pipeline stop`."""
    from smqrt.pipeline import runner

    places = _at(app, state, journal, token)
    catalog = places.catalog()
    with shown(places.state, [query.name for query in catalog.select(names)]) as report:
        code = runner.run(catalog, names, places.options(report=report, **options))
    sys.exit(code)


@pipeline.command()
@_names
@_places()
@click.option("--watch", is_flag=True, help="Go on until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per query and line.")
def status(names: tuple[str, ...], app: Path, state: Path | None, watch: bool, as_json: bool) -> None:
    """Tell how queries are doing, also when they run elsewhere under the same --state.

    Exit code 1 when one of them has failed or died.
    """
    places = _at(app, state)
    if watch:
        watching(lambda: _chosen(places, names))
        return
    found = _chosen(places, names)
    if as_json:
        for each in found:
            click.echo(json.dumps(asdict(each)))
    elif found:
        console = Console(width=None if sys.stdout.isatty() else 200)
        console.print(table(found, console.width))
    else:
        click.echo(f"Nothing has run yet with the state in {places.state}.", err=True)
    sys.exit(any(each.state in ("failed", "dead") for each in found))


def _chosen(places: Places, names: Sequence[str]) -> list[Status]:
    known = {each.name: each for each in read_all(places.state)}
    for name in names:
        if name not in known:
            raise PipelineError(f"{name} never ran with the state in {places.state}; there are: {_list(known)}.")
    return [known[name] for name in names or known]


def _list(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


@pipeline.command()
@_names
@_places()
@click.option(
    "--timeout", "timeout_s", type=float, default=60.0, show_default=True, help="Seconds to wait for the end."
)
def stop(names: tuple[str, ...], app: Path, state: Path | None, timeout_s: float) -> None:
    """Stop the queries NAME, or all of them, after the micro-batch under way, and wait for it."""
    places = _at(app, state)
    wanted = [each.name for each in _chosen(places, names)]
    working = {name: where for name in wanted if (where := _where(places, name))}
    for name in working:
        process.request_stop(places.state / name)
    for pid in _all_of(places, working):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    for name in wanted:
        _wait_stopped(places, name, deadline)
        click.echo(f"{name} is stopped" if name in working else f"{name} was not running")


def _where(places: Places, name: str) -> int | str | None:
    """The process of this machine, or the other machine, on which a query runs."""
    return process.running(places.state / name) or process.elsewhere(places.state / name)


def _all_of(places: Places, working: Mapping[str, int | str]) -> set[int]:
    """The processes here that have nothing else to do than these queries, and needn't go on."""
    folders = [path for path in places.state.iterdir() if path.is_dir()] if places.state.is_dir() else []
    others = {process.running(path) for path in folders if path.name not in working}
    return {where for where in working.values() if isinstance(where, int)} - others


def _wait_stopped(places: Places, name: str, deadline: float) -> None:
    while where := _where(places, name):
        if time.monotonic() > deadline:
            there = f"as process {where}; kill -9 {where}" if isinstance(where, int) else f"on {where}; kill -9 there"
            raise PipelineError(f"{name} still runs, {there} ends it and loses nothing.")
        time.sleep(0.05)


@pipeline.command()
@click.argument("name")
@_places(journal=True)
@click.option("--keep-output", is_flag=True, help="Leave the files of a table where they are.")
def reset(name: str, app: Path, state: Path | None, journal: str | None, token: str | None, keep_output: bool) -> None:
    """Forget how far the query NAME is, and remove its table: it starts anew with the next run."""
    from smqrt.pipeline import reset as resetting

    places = _at(app, state, journal, token)
    table_of = None if keep_output else _table_of(places, name)
    for removed in resetting.reset(places.state, name, places.journal, table_of):
        click.echo(f"Removed {removed}")


def _table_of(places: Places, name: str) -> str | None:
    from smqrt.pipeline import tables

    query = places.catalog().declarations.get(name)
    return tables.location(query, places.app) if query and query.kind == "table" else None


@pipeline.command("test")
@click.argument("what", nargs=-1, metavar="[FOLDER] [NAME]...")
@_places()
@click.option("--journal", type=click.Path(path_type=Path), help="Rows to test on.", show_default="the .jsonl of tests")
@click.option("--update", is_flag=True, help="Keep what comes out as what is expected.")
def test_(what: tuple[str, ...], app: Path, state: Path | None, journal: Path | None, update: bool) -> None:
    """Run the queries NAME, or all of them, on recorded rows, and compare what comes out with files. No hub is needed.

    FOLDER holds the pipelines, without it the folder `pipelines` of the application; in its folder `tests` are the rows
    and a file for each query.
    """
    from smqrt.pipeline import testing

    given = bool(what) and Path(what[0]).exists()
    folder = Path(what[0]).absolute() if given else _at(app, state).pipelines
    sys.exit(testing.run(folder, journal, update, what[given:], click.echo))


@pipeline.command()
@click.argument("name")
@_places(journal=True)
@click.option("--from", "start", metavar="TIME", required=True, help="Where to begin: as with run.")
@click.option("--to", "until", metavar="TIME", default="latest", show_default=True, help="Where to end.")
@click.option("--republish", is_flag=True, help="Publish the results; without it only tables are written.")
@click.option("--master", default="local[*]", show_default=True, help="Where Spark computes.")
def backfill(name: str, app: Path, state: Path | None, journal: str | None, token: str | None, **options: Any) -> None:
    """Compute the query NAME once more on a part of the journal."""
    from smqrt.pipeline.backfill import backfill as again

    places = _at(app, state, journal, token)
    sys.exit(again(places.catalog(), name, places.options(**options)))


@pipeline.command(cls=_Submit)
@_names
@_places(journal=True)
@click.option("--master", required=True, help="spark://HOST:PORT, k8s://https://HOST:PORT or yarn.")
@click.option(
    "--deploy-mode", type=click.Choice(["client", "cluster"]), default="client", show_default=True, help=_MODE
)
@click.option("--python", help="Python of the workers.", show_default="the path of the one that runs here")
@_start
@click.option("--dry-run", is_flag=True, help="Only print the command.")
@click.pass_obj
def submit(
    extra: list[str],
    /,
    names: tuple[str, ...],
    app: Path,
    state: Path | None,
    journal: str | None,
    token: str | None,
    dry_run: bool,
    **options: Any,
) -> None:
    """Run the queries NAME, or all of them, on a cluster. What stands behind -- goes to spark-submit."""
    from smqrt.pipeline.submit import Submission, prepare

    places = _at(app, state, journal, token)
    if state is None and options["deploy_mode"] == "cluster":
        raise PipelineError("--deploy-mode cluster: name a folder that every machine of the cluster sees with --state.")
    if "://" not in places.journal:
        places = replace(places, journal=str(Path(places.journal).absolute()))
    places.catalog().select(names)
    given = Submission(names, options.pop("master"), places.app, places.journal, places.state, **options)
    command = prepare(replace(given, token=token, extra=tuple(extra)))
    if dry_run:
        click.echo(str(command))
    else:
        command.execute()


@pipeline.command()
@_places(journal=True)
@click.option("--no-spark", is_flag=True, help="Don't start Spark, which would plan every query.")
def doctor(app: Path, state: Path | None, journal: str | None, token: str | None, no_spark: bool) -> None:
    """Look whether everything is there that pipelines need. Exit code 1 when something is missing."""
    from smqrt.pipeline.doctor import Place, examine

    places = _at(app, state, journal, token)
    faults = 0
    for check in examine(Place(places.app, places.state, places.journal, token, not no_spark)):
        mark = click.style("ok   ", "green") if check.ok else click.style("FAULT", "red", bold=True)
        click.echo(f"{mark}  {check.name:10}  {check.detail}" + (f": {check.remedy}" if check.remedy else ""))
        faults += not check.ok
    sys.exit(bool(faults))


@pipeline.command()
def warm() -> None:
    """Make Spark start faster on this machine: an archive of its classes, about 200 MB. Takes a minute, once."""
    from smqrt.pipeline.warm import build

    click.echo("Spark is started three times for this.")
    made = build()
    click.echo(f"Made {made.path}, {made.size_bytes / 1e6:,.0f} MB")
    click.echo(f"Until the end of a first small job: {made.before_s:.1f} s before, {made.after_s:.1f} s with it")
