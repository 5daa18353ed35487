"""Shared options of the journal and pipeline commands.

They locate an application, its journal and the state of its queries, and select a part of the journal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from smqrt.cli.terminal import InterruptibleCommand, discard_output
from smqrt.errors import ArgumentError, JournalError
from smqrt.journal import files

if TYPE_CHECKING:
    from smqrt.journal.reader import Journal, Offsets
    from smqrt.pipeline.discover import Catalog
    from smqrt.pipeline.runner import RunOptions

TOKEN_VARIABLE = "SMQRT_JOURNAL_TOKEN"
_MOMENT = "earliest, latest, 2h (two hours ago), an ISO time (UTC) or a sequence number."
_RETRY_S = 5.0  # for a hub that does not respond


journal_folder = click.argument("path", metavar="[PATH]", type=click.Path(path_type=Path), default=".")
journal_location = click.argument("path", metavar="[PATH|URL]", default=".")
token_option = click.option(
    "--token", envvar=TOKEN_VARIABLE, help=f"Access token, for a URL.  [default: the variable {TOKEN_VARIABLE}]"
)
cafile_option = click.option(
    "--cafile",
    type=click.Path(exists=True, dir_okay=False),
    help="CA certificates to trust, for an https URL.  [default: the system's]",
)
topics_option = click.option(
    "--topic", "-t", "topics", multiple=True, help="Only topics that match; + and # are wildcards. Repeatable."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per line.")
from_option = click.option("--from", "start", metavar="TIME", help=f"First message: {_MOMENT}")
until_option = click.option("--until", "end", metavar="TIME", help="End of the range, exclusive; values as for --from.")


def folder(path: Path) -> Path:
    """Return the folder of a journal: the path itself, or `.journal` of the application there.

    Raises:
        JournalError: there is no journal.
    """
    path = files.journal_folder(path)
    if (path / ".journal").is_dir():
        return path / ".journal"
    if any((path / name).exists() for name in ("wal", "data", "manifest.json")):
        return path
    raise JournalError(f"no journal in {path}. Pass its folder, or that of an application whose hub has journal=True.")


def opened_journal(path: str, token: str | None = None, cafile: str | None = None) -> Journal:
    """Return the journal of a folder, of an application's folder, or of a URL.

    Raises:
        JournalError: there is no journal, or the hub does not respond.
    """
    if files.is_address(path):
        from smqrt.journal.remote import open_journal

        return open_journal(path, token, cafile=cafile, retry_s=_RETRY_S)
    from smqrt.journal.reader import Journal

    return Journal(folder(Path(path)))


def offsets_of(opened: Journal, moment: str, option: str) -> Offsets:
    """Return the sequence numbers, by node, of a value of --from or --until.

    Raises:
        ArgumentError: it is neither a time nor a number.
    """
    from smqrt.journal.record import parse_moment

    if moment in ("earliest", "latest"):
        return opened.begin() if moment == "earliest" else opened.end()
    if moment.isdecimal():  # the same sequence number on all nodes
        return dict.fromkeys(opened.end(), int(moment))
    ts_us = parse_moment(moment, option)
    return opened.offsets_until(ts_us) if option == "--until" else opened.offsets_at(ts_us)


def chosen_range(opened: Journal, start: str | None, end: str | None) -> tuple[Offsets, Offsets]:
    """Return start and end of the range of --from and --until; without them, all recorded messages.

    Raises:
        ArgumentError: the end is before the start.
    """
    first = offsets_of(opened, start or "earliest", "--from")
    last = offsets_of(opened, end or "latest", "--until")
    # The range of a single node may be negative, since nodes record at different times.
    excess = [first.get(node, 0) - last[node] for node in last]
    if start and end and min(excess, default=0) >= 0 < max(excess, default=0):
        raise ArgumentError(f"--from {start} is after --until {end}. Swap them.")
    return first, last


def plural(count: int, what: str) -> str:
    """Return a count with its noun: "1 batch", "2,000 batches"."""
    plural_noun = f"{what}es" if what.endswith("ch") else f"{what}s"
    return f"{count:,} {what if count == 1 else plural_noun}"


def size(count: float) -> str:
    """Return a number of bytes with its unit: "15 bytes", "1.2 MB"."""
    if count < 1000:
        return f"{count:.0f} bytes"
    units = iter(("KB", "MB", "GB", "TB"))
    while count >= 1000:
        count, unit = count / 1000, next(units)
    return f"{count:.1f} {unit}"


class JournalCommand(InterruptibleCommand):
    """Prints errors as one sentence: exit code 2 for wrong arguments, 1 for all other errors."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except ArgumentError as error:
            raise click.UsageError(str(error)) from error
        except ImportError as error:
            if (error.name or "").partition(".")[0] != "pyarrow":  # an optional dependency
                raise
            raise click.ClickException(
                "Reading compacted rows needs pyarrow, which is not installed: pip install 'smqrt[spark]'."
            ) from None
        except BrokenPipeError:
            discard_output()
        return None


class JournalGroup(JournalCommand, click.Group):
    """A group of `JournalCommand`s."""


# ---- pipelines

_Command = TypeVar("_Command", bound=Callable[..., Any])


class _Folder(click.Path):
    """A local folder, as a path or a file URI."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(files.state_folder(value), param, ctx)


_FOLDER = _Folder(file_okay=False, path_type=Path)
_APP = click.option(
    "--app",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=".",
    help="Folder of the application.  [default: the current folder]",
)
_STATE = click.option(
    "--state", type=_FOLDER, help="Folder of checkpoints and status.  [default: .pipelines of the application]"
)
_JOURNAL = click.option(
    "--journal",
    metavar="PATH|URL",
    help="Folder of the journal, or its URL on a hub.  [default: .journal of the application]",
)
_TABLES = click.option(
    "--tables",
    metavar="FOLDER|URI",
    help="Parent of tables with relative paths: a folder, or a URI that Spark can write to, such as s3a://BUCKET/X.  "
    "[default: .tables of the application]",
)
_TOKEN = click.option(
    "--token",
    envvar=TOKEN_VARIABLE,
    help=f"Access token of the journal.  [default: the variable {TOKEN_VARIABLE}, else the token in the journal's "
    "folder]",
)


@dataclass(frozen=True)
class PipelineLocations:
    """Folders and URLs of an application's pipelines.

    Attributes:
        app: the application's folder.
        state: the folder of checkpoints and status.
        journal: path or URL of the journal.
        token: access token of the journal.
        state_given: whether --state was given.
        tables: folder or URI of tables; None for `.tables` of the application.
        cafile: file with CA certificates to trust, for a journal at an https URL.
    """

    app: Path
    state: Path
    journal: str
    token: str | None
    state_given: bool
    tables: str | None = None
    cafile: str | None = None

    @property
    def pipelines(self) -> Path:
        """The folder of pipeline files."""
        return self.app / "pipelines"

    def catalog(self) -> Catalog:
        """Return the declarations of the pipeline files."""
        from smqrt.pipeline.discover import load

        return load(self.pipelines)

    def options(self, **more: object) -> RunOptions:
        """Return RunOptions for these locations; `more` are additional fields."""
        from smqrt.pipeline.runner import RunOptions

        given = {"token": self.token, "cafile": self.cafile, "tables": self.tables, **more}
        return RunOptions(self.journal, self.app, self.state, **cast("dict[str, Any]", given))


def with_app(command: _Command) -> _Command:
    """Decorator: add the options --app and --state, and pass the command a PipelineLocations as `paths`."""
    extended: _Command = _APP(_STATE(_with_paths(command)))
    return extended


def with_journal(command: _Command) -> _Command:
    """Decorator: as `with_app`, with the additional options --journal, --token, --cafile and --tables."""
    extended: _Command = _APP(_STATE(_JOURNAL(_TOKEN(cafile_option(_TABLES(_with_paths(command)))))))
    return extended


def _with_paths(command: Any) -> Any:
    @wraps(command)
    def call(
        *args: Any,
        app: Path,
        state: Path | None,
        journal: str | None = None,
        token: str | None = None,
        cafile: str | None = None,
        tables: str | None = None,
        **rest: Any,
    ) -> Any:
        home = app.absolute()  # Spark may run in another folder
        state_folder = (state or home / ".pipelines").absolute()
        if journal and not files.is_address(journal):
            journal = str(files.journal_folder(journal))
        cafile = cafile and str(Path(cafile).absolute())
        paths = PipelineLocations(
            home, state_folder, journal or str(home / ".journal"), token, state is not None, tables, cafile
        )
        return command(*args, paths=paths, **rest)

    return call
