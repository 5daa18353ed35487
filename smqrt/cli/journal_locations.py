"""Options that commands on journals share, the journal and the part of it that they mean, and their errors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from smqrt.cli.terminal import InterruptibleCommand, discard_output
from smqrt.errors import ArgumentError, JournalError
from smqrt.journal import locations

if TYPE_CHECKING:
    from smqrt.journal.reader import Journal, Offsets

_TOKEN_VARIABLE = "SMQRT_JOURNAL_TOKEN"
_MOMENT = "earliest, latest, 2h (so long ago), an ISO time (UTC) or a sequence number."
_RETRY_S = 5.0


journal_folder = click.argument("path", metavar="[PATH]", type=click.Path(path_type=Path), default=".")
journal_place = click.argument("path", metavar="[PATH|URL]", default=".")
token_option = click.option(
    "--token", envvar=_TOKEN_VARIABLE, help=f"For a URL; also in the variable {_TOKEN_VARIABLE}."
)
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
    path = locations.journal_folder(path)
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
    if locations.is_address(path):
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


def rows_between(first: Offsets, last: Offsets) -> int:
    """Returns how many rows a range has."""
    return sum(max(0, end - first.get(node, 0)) for node, end in last.items())


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
