"""Options that commands on journals and pipelines share: where an application, its journal and its state are, and which
part of the journal is meant; and the errors of these commands.
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
    from smqrt.pipeline.run_context import RunOptions

TOKEN_VARIABLE = "SMQRT_JOURNAL_TOKEN"
_MOMENT = "earliest, latest, 2h (so long ago), an ISO time (UTC) or a sequence number."
_RETRY_S = 5.0


journal_folder = click.argument("path", metavar="[PATH]", type=click.Path(path_type=Path), default=".")
journal_place = click.argument("path", metavar="[PATH|URL]", default=".")
token_option = click.option("--token", envvar=TOKEN_VARIABLE, help=f"For a URL; also in the variable {TOKEN_VARIABLE}.")
cafile_option = click.option(
    "--cafile",
    type=click.Path(exists=True, dir_okay=False),
    help="For an https URL: certificates to trust instead of the system's.",
)
topics_option = click.option(
    "--topic", "-t", "topics", multiple=True, help="Only topics like this; + and # are wildcards."
)
json_option = click.option("--json", "as_json", is_flag=True, help="For programs: JSON.")
from_option = click.option("--from", "start", metavar="TIME", help=f"Begin here: {_MOMENT}")
until_option = click.option("--until", "end", metavar="TIME", help="End before this; as --from.")


def folder(path: Path) -> Path:
    """Returns the folder of the journal that a path names: itself, or the one of the application there.

    Raises:
        JournalError: there is no journal.
    """
    path = files.journal_folder(path)
    if (path / ".journal").is_dir():
        return path / ".journal"
    if any((path / name).exists() for name in ("wal", "data", "manifest.json")):
        return path
    raise JournalError(
        f"{path} holds no journal: name its folder, or that of an application whose hub has journal=True."
    )


def opened_journal(path: str, token: str | None = None, cafile: str | None = None) -> Journal:
    """Returns the journal in a folder, in that of an application, or at an address.

    Raises:
        JournalError: there is none, or it doesn't answer.
    """
    if files.is_address(path):
        from smqrt.journal.remote import open_journal

        return open_journal(path, token, cafile=cafile, retry_s=_RETRY_S)
    from smqrt.journal.reader import Journal

    return Journal(folder(Path(path)))


def offsets_of(opened: Journal, moment: str, option: str) -> Offsets:
    """Returns the numbers, by node, that a moment stands for.

    Raises:
        ArgumentError: it is none.
    """
    from smqrt.journal.timestamps import parse_moment

    if moment in ("earliest", "latest"):
        return opened.begin() if moment == "earliest" else opened.end()
    if moment.isdecimal():
        return dict.fromkeys(opened.end(), int(moment))
    ts_us = parse_moment(moment, option)
    return opened.offsets_until(ts_us) if option == "--until" else opened.offsets_at(ts_us)


def chosen_range(opened: Journal, start: str | None, end: str | None) -> tuple[Offsets, Offsets]:
    """Returns from where to where: nothing said is everything there is now.

    Raises:
        ArgumentError: it ends before it begins.
    """
    first = offsets_of(opened, start or "earliest", "--from")
    last = offsets_of(opened, end or "latest", "--until")
    behind = [first.get(node, 0) - last[node] for node in last]
    if start and end and min(behind, default=0) >= 0 < max(behind, default=0):
        raise ArgumentError(f"--from {start} is behind --until {end}: give the earlier one to --from.")
    return first, last


def many(count: int, what: str) -> str:
    """Returns "1 batch", "2,000 batches"."""
    plural = f"{what}es" if what.endswith("ch") else f"{what}s"
    return f"{count:,} {what if count == 1 else plural}"


def size(count: float) -> str:
    """Returns "15 bytes", "1.2 MB"."""
    if count < 1000:
        return f"{count:.0f} bytes"
    units = iter(("KB", "MB", "GB", "TB"))
    while count >= 1000:
        count, unit = count / 1000, next(units)
    return f"{count:.1f} {unit}"


class JournalCommand(InterruptibleCommand):
    """Says what goes wrong in one sentence: exit code 2 for a wrong word, 1 for everything else."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except ArgumentError as error:
            raise click.UsageError(str(error)) from error
        except ImportError as error:
            if (error.name or "").partition(".")[0] != "pyarrow":
                raise
            raise click.ClickException(
                "Reading compacted rows needs pyarrow, which is not installed: pip install 'smqrt[spark]'."
            ) from None
        except BrokenPipeError:
            discard_output()
        return None


class Journals(JournalCommand, click.Group):
    """A group of such commands."""


# ---- pipelines

_Command = TypeVar("_Command", bound=Callable[..., Any])


class _Folder(click.Path):
    """A folder of this machine, which a file URI may name too."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(files.state_folder(value), param, ctx)


_FOLDER = _Folder(file_okay=False, path_type=Path)
_APP = click.option(
    "--app",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=".",
    show_default="the current folder",
    help="The application's folder.",
)
_STATE = click.option(
    "--state", type=_FOLDER, show_default=".pipelines in it", help="Folder of checkpoints and status."
)
_JOURNAL = click.option(
    "--journal",
    metavar="PATH|URL",
    show_default=".journal in it",
    help="The journal: its folder, or the URL under which a hub serves it.",
)
_TABLES = click.option(
    "--tables",
    metavar="FOLDER|URI",
    show_default=".tables in it",
    help="What relative paths of tables are below: a folder, or a URI that Spark can write to, such as s3a://BUCKET/X.",
)
_TOKEN = click.option(
    "--token",
    envvar=TOKEN_VARIABLE,
    help=f"What the hub asks for; also in the variable {TOKEN_VARIABLE}.",
    show_default="the one in the journal's folder",
)


_CAFILE = click.option(
    "--cafile",
    type=click.Path(exists=True, dir_okay=False),
    help="Certificates to trust instead of the system's, for an https URL.",
)


@dataclass(frozen=True)
class PipelineLocations:
    """Where an application's pipelines and what belongs to them are.

    Attributes:
        app: its folder; state: folder of the state of its queries.
        journal: path or URL; token: for the hub; cafile: certificates to trust there.
        tables: folder or URI of tables; None is `.tables` of the application.
        state_given: whether somebody named the folder of the state.
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
        """What the folder declares."""
        from smqrt.pipeline.discover import load

        return load(self.pipelines)

    def options(self, **more: object) -> RunOptions:
        """How to run pipelines here; `more` are further fields of RunOptions."""
        from smqrt.pipeline.run_context import RunOptions

        given = {"token": self.token, "cafile": self.cafile, "tables": self.tables, **more}
        return RunOptions(self.journal, self.app, self.state, **cast("dict[str, Any]", given))


def with_app(command: _Command) -> _Command:
    """Gives a command the argument `paths`, and the options --app and --state."""
    extended: _Command = _APP(_STATE(_given(command)))
    return extended


def with_journal(command: _Command) -> _Command:
    """The same, with the options --journal, --token, --cafile and --tables too."""
    extended: _Command = _APP(_STATE(_JOURNAL(_TOKEN(_CAFILE(_TABLES(_given(command)))))))
    return extended


def _given(command: Any) -> Any:
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
        home = app.absolute()
        found = (state or home / ".pipelines").absolute()
        if journal and not files.is_address(journal):
            journal = str(files.journal_folder(journal))
        cafile = cafile and str(Path(cafile).absolute())
        paths = PipelineLocations(
            home, found, journal or str(home / ".journal"), token, state is not None, tables, cafile
        )
        return command(*args, paths=paths, **rest)

    return call
