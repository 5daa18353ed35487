"""The options of `smqrt pipeline` that say where an application, its journal and its state are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from smqrt.journal import locations

if TYPE_CHECKING:
    from smqrt.pipeline.discover import Catalog
    from smqrt.pipeline.run_context import RunOptions

TOKEN_VARIABLE = "SMQRT_JOURNAL_TOKEN"

_Command = TypeVar("_Command", bound=Callable[..., Any])


class _Folder(click.Path):
    """A folder of this machine, which a file URI may name too."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(locations.state_folder(value), param, ctx)


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
        if journal and not locations.is_address(journal):
            journal = str(locations.journal_folder(journal))
        cafile = cafile and str(Path(cafile).absolute())
        paths = PipelineLocations(
            home, found, journal or str(home / ".journal"), token, state is not None, tables, cafile
        )
        return command(*args, paths=paths, **rest)

    return call
