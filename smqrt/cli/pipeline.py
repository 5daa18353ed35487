"""`smqrt pipeline`: creation, execution and inspection of an application's pipelines."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from smqrt.cli.locations import PipelineLocations, with_app, with_journal
from smqrt.cli.terminal import InterruptibleGroup, json_line, write_line
from smqrt.errors import JournalError, PipelineError
from smqrt.journal import files
from smqrt.journal.record import iso
from smqrt.pipeline import status as query_status
from smqrt.pipeline.status import DISK_FULL, LIVE, Status, read, read_all
from smqrt.printable import printable

if TYPE_CHECKING:
    from smqrt.pipeline.api import Declaration


# ---- Status of queries as a table or as log lines

_STYLES = {
    "running": "green",
    "waiting": "green dim",
    "starting": "yellow",
    "stuck": "bold red",
    "disk full": "bold red",
    "failed": "bold red",
    "dead": "bold red",
}
_COLUMNS = ("query", "state", "batch", "rows/s", "lag", "batch time", "kept", "watermark", "too late", "left out")
_LEFT_ALIGNED = ("query", "state", "watermark")
_OPTIONAL_COLUMNS = ("batch", "left out", "too late", "watermark", "kept")  # omitted in this order on narrow terminals
_GAP = 2  # characters between columns
_UNKNOWN = "–"


def status_table(statuses: Sequence[Status], width: int = 200) -> Table:
    """Return a table with a row for each query, and the errors below.

    Args:
        statuses: the status of queries, from `read_all`.
        width: width of the terminal in characters; a narrow one omits some columns.
    """
    rows = [_cells(status) for status in statuses]
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
    chosen = list(range(len(_COLUMNS)))
    for name in _OPTIONAL_COLUMNS:
        if sum(widths[column] + _GAP for column in chosen) > width:
            chosen.remove(_COLUMNS.index(name))
    table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="bold")
    for column in chosen:
        is_left = _COLUMNS[column] in _LEFT_ALIGNED
        table.add_column(_COLUMNS[column], justify="left" if is_left else "right", no_wrap=True)
    for status, cells in zip(statuses, rows, strict=True):
        styles = {"state": _STYLES.get(status.state, "dim")}
        table.add_row(*(Text(cells[column], styles.get(_COLUMNS[column], "")) for column in chosen))
    errors = [f"{status.name}{text}" for status in statuses if (text := _error_text(status))]
    table.caption = Text("\n".join(errors), "red") if errors else None
    table.caption_justify = "left"
    return table


def status_line(status: Status) -> str:
    """Return the status of a query as one line for a log; the order of the parts is fixed."""
    name, state, batch, rate, lag, batch_time, kept, watermark, late, left_out = _cells(status)
    parts = [f"{name} {state}", f"batch {batch}", f"{rate} rows/s", f"lag {lag}", f"batch time {batch_time}"]
    parts += [f"kept {kept}"] if kept else []
    parts += [f"watermark {watermark}"] if watermark else []
    parts += [f"too late {late}"] if late else []
    parts += [f"left out {left_out}"] if left_out else []
    return ", ".join(parts) + _error_text(status)


def _error_text(status: Status) -> str:
    """Return the error of a query, or the reason why it makes no progress, after a colon."""
    since = f" since {time.strftime('%H:%M:%S UTC', time.gmtime(status.stuck_since))}" if status.stuck_since else ""
    why = status.error or (status.trouble if status.stuck_since else "")
    return f"{since}: {printable(why, lines=True)}" if why else ""


def _cells(status: Status) -> list[str]:
    """Return the texts of a table row, in the order of `_COLUMNS`."""
    # Queries in these states have not read the end of the journal: a lag of 0 would be wrong.
    is_lag_unknown = status.state in ("starting", DISK_FULL) and not status.lag_rows
    size_bytes = status.state_bytes
    size = f"{size_bytes / 1e6:,.1f} MB" if size_bytes >= 1e5 else f"{size_bytes / 1e3:,.1f} kB"
    left_out = status.bad_json + status.future + sum(status.expectations.values())
    try:
        watermark = datetime.fromisoformat(status.watermark).strftime("%Y-%m-%d %H:%M:%S")
        watermark = watermark.removeprefix(time.strftime("%Y-%m-%d ", time.gmtime())) + " UTC"  # without today's date
    except ValueError:
        watermark = printable(status.watermark)
    return [
        status.name,
        status.state,
        str(status.batch) if status.batch >= 0 else "-",
        f"{status.rows_per_s:,.0f}",
        _UNKNOWN if is_lag_unknown else f"{status.lag_rows:,} rows {status.lag_s:,.1f} s",
        f"{status.batch_ms:,} ms",
        f"{status.state_rows:,} rows {size}" if status.state_rows or size_bytes else "",
        watermark,
        f"{status.dropped_by_watermark:,}" if status.dropped_by_watermark else "",
        f"{left_out:,}" if left_out else "",
    ]


_REFRESH_S = 0.5
_LINE_INTERVAL_S = 10.0


@contextmanager
def shown_progress(state: Path, names: Sequence[str]) -> Iterator[Callable[[str], None]]:
    """Context manager: show the progress of queries, as a live table on a terminal, else as a line per query.

    Args:
        state: folder of the state of queries.
        names: the names of the queries; the status of their dead letters is included.

    Yields:
        A function that prints a sentence without breaking the table.
    """
    finished = threading.Event()
    show = _live_table if sys.stderr.isatty() else _print_lines
    console = Console(stderr=True)
    # In a thread: the main thread runs the queries.
    thread = threading.Thread(target=show, args=(state, names, finished, console), daemon=True)
    thread.start()
    try:
        yield lambda text: console.print(Text(printable(text, lines=True)), soft_wrap=not console.is_terminal)
    finally:
        finished.set()
        thread.join()


def _live_table(state: Path, names: Sequence[str], finished: threading.Event, console: Console) -> None:
    from rich.live import Live

    began = time.time()
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while not finished.wait(_REFRESH_S):
            live.update(status_table(_recent(state, names, began), console.width), refresh=True)
        live.update(status_table(_recent(state, names, began), console.width), refresh=True)  # the final states


def _print_lines(state: Path, names: Sequence[str], finished: threading.Event, console: Console) -> None:
    """Print a line for each query when its state changes, and every ten seconds while rows arrive."""
    printed: dict[str, tuple[str, float]] = {}
    began = time.time()
    done = False
    while not done:
        done = finished.wait(_REFRESH_S)  # the loop runs once more, for the final states
        for status in _recent(state, names, began):
            before, when = printed.get(status.name, ("", 0.0))
            if status.state != before or (status.rows_per_s and time.monotonic() - when >= _LINE_INTERVAL_S):
                printed[status.name] = (status.state, time.monotonic())
                console.print(Text(status_line(status)), soft_wrap=True)


def _recent(state: Path, names: Sequence[str], began: float) -> list[Status]:
    """Return the status of these queries and of their dead letters, in this run."""
    # Dead letters are queries of this process that `names` does not contain.
    known = read_all(state)
    return [each for each in known if each.since >= began - 1 and (each.name in names or each.pid == os.getpid())]


def watch_table(statuses: Callable[[], Sequence[Status]]) -> None:
    """Show a live table until Ctrl-C.

    Args:
        statuses: returns the status of queries.
    """
    from rich.live import Live

    with suppress(KeyboardInterrupt), Live(auto_refresh=False) as live:
        while True:
            live.update(status_table(statuses(), live.console.width), refresh=True)
            time.sleep(_REFRESH_S)


_Command = TypeVar("_Command", bound=Callable[..., Any])
_FROM = "Start of queries that never ran: earliest, latest, 2h (two hours ago), an ISO time or a sequence number."
_MODE = "Where the driver runs: on this machine, or in the cluster."
_HUB_RETRY = "Seconds that a micro-batch waits for an unreachable hub."


@click.group(cls=InterruptibleGroup, context_settings={"help_option_names": ["-h", "--help"]})
def pipeline() -> None:
    """Run Spark queries on the messages of a hub.

    `smqrt help pipelines` is the page of the manual.
    """


_names = click.argument("names", nargs=-1, metavar="[NAME]...")


def _start(command: _Command) -> _Command:
    """Decorator: add the options for the start of new queries."""
    for option in (
        click.option("--republish", is_flag=True, help="Also publish results of rows from before the first start."),
        click.option("--once", is_flag=True, help="Process the available rows, then exit."),
        click.option("--from", "start", metavar="TIME", default="latest", show_default=True, help=_FROM),
    ):
        command = option(command)
    return command


class _Submit(click.Command):
    """A command that passes the words after `--` to spark-submit."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        ctx.obj = args[end + 1 :]
        return super().parse_args(ctx, args[:end])


def _spark_settings(command: _Command) -> _Command:
    """Decorator: add common options of spark-submit, which become the argument `settings`."""

    @wraps(command)
    def call(conf: tuple[str, ...], driver_memory: str | None, packages: str | None, **arguments: Any) -> Any:
        settings = dict(each.split("=", 1) for each in conf if re.fullmatch(r"spark\.[^=\s]+=.*", each, re.DOTALL))
        for each in conf:
            if each.split("=", 1)[0] not in settings:
                message = f"{each!r} is not a setting of Spark; write spark.NAME=VALUE."
                raise click.BadParameter(message, param_hint="--conf")
        if driver_memory:
            from smqrt.pipeline.session import MEMORY, memory_bytes

            memory_bytes(driver_memory, "--driver-memory ")  # only checks the value
            settings[MEMORY] = driver_memory
        if packages:
            from smqrt.pipeline import delta

            settings = delta.settings(packages) | settings | {"spark.jars.packages": packages}
        return command(settings=settings, **arguments)

    extended: Any = call
    for option in (
        click.option("--packages", metavar="LIST", help="Maven coordinates of jars for Spark, comma-separated."),
        click.option("--driver-memory", metavar="SIZE", help="Memory of Spark's driver, such as 4g.  [default: 1g]"),
        click.option("--conf", multiple=True, metavar="KEY=VALUE", help="A setting of Spark; repeatable."),
    ):
        extended = option(extended)
    return cast(_Command, extended)


@pipeline.command()
@click.argument("name")
@with_app
def init(name: str, paths: PipelineLocations) -> None:
    """Create the pipeline NAME from a template, with rows to test it."""
    from smqrt.pipeline import testing

    for path in testing.make_pipeline(paths.pipelines, name):
        click.echo(f"Created {path}")
    where = "" if paths.app == Path.cwd() else f" --app {paths.app}"
    click.echo(f"Try it with: smqrt pipeline test{where}; run it with: smqrt pipeline run {name}{where}")


@pipeline.command("list")
@with_app
def list_(paths: PipelineLocations) -> None:
    """List the queries with their target, state, file and line."""
    rows = []
    for query in paths.catalog().queries():
        status = read(paths.state / query.name)
        target = query.options.get("to") or query.options.get("path") or ""
        rows.append((query.name, query.kind, str(target), status.state if status else "never ran", query.where))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@pipeline.command()
@_names
@with_journal
@click.option("--master", default="local[*]", show_default=True, help="Master URL of Spark; for clusters see submit.")
@_start
@click.option("--trigger", metavar="DURATION", help="Minimum time between micro-batches; overrides the files.")
@click.option("--hub-retry", "hub_retry_s", type=click.FloatRange(0), default=60.0, show_default=True, help=_HUB_RETRY)
@_spark_settings
@click.option(
    "--metrics",
    "metrics_port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Serve Prometheus metrics on this port of 127.0.0.1.",
)
def run(names: tuple[str, ...], paths: PipelineLocations, metrics_port: int | None, **options: object) -> None:
    """Run queries until Ctrl-C or `smqrt pipeline stop`.

    Without NAME, all queries run.
    """
    from smqrt.pipeline import runner

    catalog = paths.catalog()
    chosen = [query.name for query in catalog.select(names)]
    if metrics_port is not None:
        query_status.serve(paths.state, chosen, metrics_port, paths.journal)
    with shown_progress(paths.state, chosen) as report:
        code = runner.run(catalog, names, paths.options(report=report, **options))
    sys.exit(code)


@pipeline.command()
@_names
@with_journal
@click.option("--watch", is_flag=True, help="Update the display until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per query.")
def status(names: tuple[str, ...], paths: PipelineLocations, watch: bool, as_json: bool) -> None:
    """Show the status of queries.

    Includes queries that other processes run with the same --state. Exit code 1 when a query has failed or its process
    has died.
    """
    if watch:
        watch_table(lambda: _chosen(paths, names))
        return
    statuses = _chosen(paths, names)
    if as_json:
        for each in statuses:
            write_line(json_line(asdict(each) | {"since": _moment(each.since), "updated": _moment(each.updated)}))
    elif statuses:
        console = Console(width=None if sys.stdout.isatty() else 200)  # in a pipe, show all columns
        console.print(status_table(statuses, console.width))
        pages = (f"Spark UI of process {each.pid}: {each.ui}" for each in statuses if each.ui and each.state in LIVE)
        warnings = (f"{each.name}: {printable(each.warning)}" for each in statuses if each.warning)
        lines = [*dict.fromkeys(pages), *warnings]
        if "://" not in paths.journal:
            from smqrt.journal import readers

            known, now_us = {each.name for each in statuses}, time.time_ns() // 1000
            with suppress(JournalError):  # the status of the queries is valid without the journal
                for reader, behind in readers.backlogs(Path(paths.journal)):
                    query = reader.name.partition(".")[0]
                    if query in known and (since := readers.stale_clause(reader, behind, now_us)):
                        lines.append(f"{reader.name} {since} in the journal; run it, or smqrt pipeline reset {query}")
        for line in lines:
            console.print(Text(line), soft_wrap=True)
    else:
        click.echo(f"Nothing has run yet with the state in {paths.state}.", err=True)
    sys.exit(any(each.state in ("failed", "dead") for each in statuses))


def _moment(seconds: float) -> str | None:
    """Return a time in the format of every `--json`; None for never."""
    return iso(round(seconds * 1_000_000)) if seconds else None


def _chosen(paths: PipelineLocations, names: Sequence[str]) -> list[Status]:
    """Return the status of these queries, of all without names. Raises PipelineError for a query that never ran."""
    known = {each.name: each for each in read_all(paths.state)}
    for name in names:
        if name not in known:
            all_names = ", ".join(known) or "none"
            raise PipelineError(f"{name} never ran with the state in {paths.state}; known queries: {all_names}.")
    return [known[name] for name in names or known]


@pipeline.command()
@_names
@with_app
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(0), default=60.0, show_default=True, help="Seconds to wait."
)
def stop(names: tuple[str, ...], paths: PipelineLocations, timeout_s: float) -> None:
    """Stop queries after the current micro-batch, and wait.

    Without NAME, all queries stop.
    """
    wanted = [each.name for each in _chosen(paths, names)]
    running = {name: where for name in wanted if (where := _where(paths, name))}
    for name in running:
        query_status.request_stop(paths.state / name)
    # SIGTERM stops all queries of a process, so it is sent only to processes without other queries.
    folders = [path for path in paths.state.iterdir() if path.is_dir()] if paths.state.is_dir() else []
    others = {query_status.running(path) for path in folders if path.name not in running}
    for pid in {where for where in running.values() if isinstance(where, int)} - others:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    for name in wanted:
        while where := _where(paths, name):
            if time.monotonic() > deadline:
                there = (
                    f"as process {where}; use kill -9 {where}"
                    if isinstance(where, int)
                    else f"on {where}; use kill -9 there"
                )
                raise PipelineError(f"{name} is still running {there}, which loses no data.")
            time.sleep(0.05)
        click.echo(f"{name} is stopped" if name in running else f"{name} was not running")


def _where(paths: PipelineLocations, name: str) -> int | str | None:
    """Return the process ID of a running query, or the name of the other machine on which it runs."""
    return query_status.running(paths.state / name) or query_status.elsewhere(paths.state / name)


@pipeline.command()
@click.argument("name")
@with_journal
@click.option("--keep-output", is_flag=True, help="Keep the files of a table.")
def reset(name: str, paths: PipelineLocations, keep_output: bool) -> None:
    """Delete the position and the table of the query NAME.

    The next run then starts it as a new query.
    """
    from smqrt.pipeline import tables
    from smqrt.pipeline.query import reset as reset_query

    location = None
    if not keep_output:
        query = paths.catalog().declarations.get(name)
        if query and query.kind == "table":
            location = tables.location(query, paths.app, paths.tables)
    for removed in reset_query(paths.state, name, paths.journal, location):
        click.echo(f"Removed {removed}")


@pipeline.command()
@_names
@with_journal
@click.option("--vacuum", metavar="TIME", help="Also remove files that only versions older than this read, such as 7d.")
@click.option("--delete", metavar="CONDITION", help="First delete rows: SQL, such as \"date < '2026-01-01'\".")
def optimize(names: tuple[str, ...], paths: PipelineLocations, vacuum: str | None, delete: str | None) -> None:
    """Merge the small files of Delta and Iceberg tables.

    Without NAME, the files of all tables are merged. The queries may run at the same time.
    """
    from smqrt.pipeline import tables

    retain = tables.retention(vacuum) if vacuum else None
    chosen = list(tables.chosen_lake_tables(paths.catalog().select(names), paths.app, paths.tables))
    for _, found in chosen if delete else ():  # check all tables before deleting rows in the first one
        tables.check_condition(found, str(delete))
    for name, found in chosen:
        click.echo(f"{name}: {tables.optimized(found, delete, retain)}")


@pipeline.command("test")
@click.argument("what", nargs=-1, metavar="[FOLDER] [NAME]...")
@with_app
@click.option(
    "--journal", "rows", type=click.Path(path_type=Path), help="Rows to test on.  [default: the .jsonl file of tests]"
)
@click.option("--update", is_flag=True, help="Save the results as the expected results.")
def test_(what: tuple[str, ...], paths: PipelineLocations, rows: Path | None, update: bool) -> None:
    """Run queries on recorded rows and compare the results.

    Without NAME, all queries run. No hub is needed. FOLDER contains the pipelines; the default is the folder
    `pipelines` of the application. Its folder `tests` contains the rows, and the expected results of each query.
    """
    from smqrt.pipeline import testing
    from smqrt.pipeline.session import interruptible

    has_folder = bool(what) and Path(what[0]).exists()
    folder = Path(what[0]).absolute() if has_folder else paths.pipelines
    names = what[has_folder:]
    sys.exit(interruptible(lambda stopping: testing.run(folder, rows, update, names, click.echo, stopping=stopping)))


@pipeline.command()
@click.argument("name")
@with_journal
@click.option("--from", "start", metavar="TIME", required=True, help="Start of the range; values as for run.")
@click.option("--to", "until", metavar="TIME", default="latest", show_default=True, help="End of the range.")
@click.option("--republish", is_flag=True, help="Publish results that are not published yet, as a new version.")
@click.option(
    "--replace", is_flag=True, help="Replace the rows of the range in a table; for published results as --republish."
)
@click.option("--master", default="local[*]", show_default=True, help="Master URL of Spark.")
@_spark_settings
def backfill(name: str, paths: PipelineLocations, **options: object) -> None:
    """Run the query NAME again on a part of the journal."""
    from smqrt.pipeline.backfill import backfill as run_backfill
    from smqrt.pipeline.session import interruptible

    catalog = paths.catalog()
    sys.exit(interruptible(lambda stopping: run_backfill(catalog, name, paths.options(**options), stopping=stopping)))


@pipeline.command(cls=_Submit)
@_names
@with_journal
@click.option("--master", required=True, help="spark://HOST:PORT, k8s://https://HOST:PORT or yarn.")
@click.option(
    "--deploy-mode", type=click.Choice(["client", "cluster"]), default="client", show_default=True, help=_MODE
)
@click.option("--python", help="Python interpreter of the workers.  [default: the path of this one]")
@_start
@click.option("--dry-run", is_flag=True, help="Only print the command.")
@click.pass_obj
def submit(
    extra: list[str],
    /,
    names: tuple[str, ...],
    paths: PipelineLocations,
    dry_run: bool,
    master: str,
    deploy_mode: str,
    python: str | None,
    start: str,
    once: bool,
    republish: bool,
) -> None:
    """Run queries on a Spark cluster.

    Without NAME, all queries run. The command passes arguments after -- to spark-submit.
    """
    from smqrt.pipeline.submit import Submission, prepare

    if deploy_mode == "cluster" and not paths.state_given:
        raise PipelineError("--deploy-mode cluster: pass --state with a folder that every machine can access.")
    if not files.is_address(paths.journal):
        paths = replace(paths, journal=str(Path(paths.journal).absolute()))  # the driver may run in another folder
    queries = paths.catalog().select(names)
    _check_tables(queries, paths, deploy_mode)
    _check_hub(queries, paths, master, deploy_mode)
    rest = (deploy_mode, paths.token, paths.cafile, python, start, once, republish, tuple(extra))
    command = prepare(Submission(names, master, paths.app, paths.journal, paths.state, paths.tables, *rest))
    if dry_run:
        click.echo(str(command))
    else:
        command.execute()


def _check_hub(queries: Sequence[Declaration], paths: PipelineLocations, master: str, deploy_mode: str) -> None:
    """Check that the cluster can reach the hub; with the driver on this machine, only warn."""
    from smqrt.pipeline.submit import unreachable_hub

    publishing = [query.name for query in queries if query.kind in ("publish", "alert")]
    if publishing and (sentence := unreachable_hub(paths.journal, master)):
        sentence = f"{', '.join(publishing)}: {sentence}"
        if deploy_mode == "cluster":
            raise PipelineError(sentence)
        click.echo(f"Warning: {sentence}", err=True)


def _check_tables(queries: Sequence[Declaration], paths: PipelineLocations, deploy_mode: str) -> None:
    """Check that --tables is given where needed: a driver in the cluster would write to its temporary folder."""
    from smqrt.pipeline import tables

    for query in queries if deploy_mode == "cluster" and not paths.tables else ():
        if query.kind == "table" and tables.is_relative(query):
            path = query.options["path"]
            raise PipelineError(
                f"{query.where}: {query.name}: the relative path {path!r} has no base folder in a cluster: pass "
                "--tables with a folder that every machine can access, or a URI."
            )


@pipeline.command()
@with_journal
@click.option("--no-spark", is_flag=True, help="Skip the check that starts Spark and plans every query.")
def doctor(paths: PipelineLocations, no_spark: bool) -> None:
    """Check that everything pipelines need is installed.

    Exit code 1 when something is missing.
    """
    from smqrt.pipeline.doctor import DoctorOptions, examine
    from smqrt.pipeline.session import interruptible

    options = DoctorOptions(paths.app, paths.state, paths.journal, paths.token, paths.cafile, not no_spark)

    def print_checks(stopping: threading.Event) -> int:
        is_missing = False
        with closing(examine(options)) as checks:  # closing stops Spark, also after an interrupt
            for check in checks:
                if stopping.is_set():
                    break
                mark = click.style("FAULT", "red", bold=True)
                if check.ok:
                    mark = click.style("warn ", "yellow") if check.remedy else click.style("ok   ", "green")
                click.echo(f"{mark}  {check.name:10}  {check.detail}" + (f": {check.remedy}" if check.remedy else ""))
                is_missing |= not check.ok
        return int(is_missing)

    sys.exit(interruptible(print_checks))


@pipeline.command()
def warm() -> None:
    """Create a class archive for a faster start of Spark.

    The archive takes about 200 MB and a minute to create, once per machine.
    """
    from smqrt.pipeline.jvm import build

    click.echo("Starting Spark three times.")
    archive = build()
    click.echo(f"Created {archive.path}, {archive.size_bytes / 1e6:,.0f} MB")
    click.echo(f"Time of a first small job: {archive.before_s:.1f} s without it, {archive.after_s:.1f} s with it")
