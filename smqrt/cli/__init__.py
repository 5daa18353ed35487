"""The command line, with the commands `new` and `help`; each other one is in a module that is loaded when called."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import click

from smqrt import __version__
from smqrt.errors import SmqrtError, StartError
from smqrt.printable import PrintableFormatter, printable

_COMMANDS = {
    "serve": ("smqrt.cli.serve", "serve", "Run applications."),
    "demo": ("smqrt.cli.demo", "demo", "Serve the demonstration applications."),
    "backup": ("smqrt.cli.backup", "backup", "Copy what a server keeps, while it runs."),
    "config": ("smqrt.cli.config", "config", "Show and check settings."),
    "restart": ("smqrt.cli.restart", "restart", "Replace a running server by a new process; its clients stay."),
    "pub": ("smqrt.cli.pubsub", "pub", "Publish to a topic."),
    "sub": ("smqrt.cli.pubsub", "sub", "Print what is published to topics."),
    "request": ("smqrt.cli.pubsub", "request", "Send a message and print the answer."),
    "servers": ("smqrt.cli.admin", "servers_", "List the running servers of this user."),
    "top": ("smqrt.cli.admin", "top", "Show how a running server does, live."),
    "peers": ("smqrt.cli.admin", "peers", "List the clients of a running server."),
    "topics": ("smqrt.cli.admin", "topics", "List the topics of a running server."),
    "cluster": ("smqrt.cli.cluster", "cluster", "Show the nodes that a running server works together with."),
    "trace": ("smqrt.cli.admin", "trace", "Show what a client does, or what goes through a topic, live."),
    "dashboard": ("smqrt.cli.admin", "dashboard", "Print a dashboard for Grafana."),
    "new": ("smqrt.cli", "new", "Make a new application to start from."),
    "passwd": ("smqrt.cli.identity", "passwd", "Set the password of a user who connects to hubs."),
    "acl": ("smqrt.cli.identity", "acl", "Tell what a user may do, and which line of the list says so."),
    "check": ("smqrt.cli.check", "check", "Find what an application calls that is absent here."),
    "bench": ("smqrt.cli.bench", "bench", "Measure a running broker."),
    "pipeline": ("smqrt.cli.pipeline", "pipeline", "Compute on what flows through a hub, with Spark."),
    "journal": ("smqrt.cli.journal", "journal", "Look into what hubs recorded, compact it, replay it."),
    "health": ("smqrt.cli.health", "health", "Tell whether a server lives."),
    "systemd-unit": ("smqrt.cli.systemd_unit", "systemd_unit", "Print a unit for systemd."),
    "query": ("smqrt.cli.query", "query", "Answer SQL about what hubs recorded."),
    "help": ("smqrt.cli", "help_", "Print the manual."),
}


@contextmanager
def collecting_later() -> Iterator[None]:
    """Loads modules without passes of the garbage collector: nearly all of what they make stays, a tenth of a start."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, name, _ = _COMMANDS[cmd_name]
        with collecting_later():
            command = getattr(import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in _COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except SmqrtError as error:
            raise click.ClickException(printable(str(error), lines=True)) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """An SMQ broker and Lua application server."""


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--python", is_flag=True, help="Write it in Python instead of Lua.")
def new(folder: Path, python: bool) -> None:
    """Make a new application in FOLDER, which must not exist or be empty."""
    from importlib import resources  # here: it loads much, which no other command needs

    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise StartError(f"{folder} is not empty; name a new folder.")
        with resources.as_file(
            resources.files("smqrt.cli") / ("template_python" if python else "template")
        ) as template:
            for file in sorted(template.iterdir()):
                (folder / file.name).write_bytes(file.read_bytes())
    except OSError as error:
        raise StartError(f"{folder} can't be made: {error.strerror}.") from None
    click.echo(f"Made a working application in {folder}. Start it with: smqrt serve --reload {folder}")


@click.command("help")
@click.argument("words", nargs=-1, metavar="[PAGE | WORD...]")
def help_(words: tuple[str, ...]) -> None:
    """Print a PAGE of the manual, or search it for each WORD; without either, list the pages.

    \b
    smqrt help                  lists the pages
    smqrt help settings         prints the page "settings"
    smqrt help send queue       lists the sections that have both words
    """
    from smqrt.manual import pages as manual

    pages = manual.pages()
    query = " ".join(words).strip()
    name = query.lower().removesuffix(".md").replace(" ", "-")
    if not query:
        _list(pages)
    elif name in pages:
        _show(pages[name])
    else:
        _search(pages, query)


def _list(pages: dict[str, str]) -> None:
    from smqrt.manual.pages import groups, title

    width = max(len(name) for name in pages if "/" not in name)
    for group in groups(pages):
        click.echo(f"{group.part}{': ' if group.title else ''}{group.title}")
        for name in group.names:
            click.echo(f"  {name:{width}}  {title(pages[name])}")
        click.echo()
    click.echo("`smqrt help PAGE` prints a page, `smqrt help WORD` searches all.")


_MAX_PAGES, _MAX_SECTIONS = 12, 3


def _search(pages: dict[str, str], query: str) -> None:
    """Print the sections that have the words of a query, by page; fail when there is none."""
    from shutil import get_terminal_size

    from smqrt.manual import search
    from smqrt.manual.pages import title

    near = search.near_names(pages, query)
    hint = f"Did you mean: {', '.join(near)}?" if near else ""
    by_page: dict[str, list[search.Found]] = {}
    for found in search.find(search.all_sections(pages), query):
        by_page.setdefault(found.section.page, []).append(found)
    if not by_page:
        raise click.UsageError(
            f"No page of the manual is called {query!r}, and none contains it. "
            + (hint or "`smqrt help` lists the pages, such as quick-start.")
        )
    if hint:
        click.echo(f"{hint}\n")
    width = min(100, get_terminal_size().columns)
    for name, all_found in list(by_page.items())[:_MAX_PAGES]:
        click.echo(f"{name}: {title(pages[name])}")
        for found in all_found[:_MAX_SECTIONS]:
            if found.section.anchor:
                click.echo(f"  {found.section.heading}")
            if found.line:
                click.echo(f"    {search.excerpt(found.line, query, width - 4)}")
        if len(all_found) > _MAX_SECTIONS:
            click.echo(f"  and {len(all_found) - _MAX_SECTIONS} more sections")
    if len(by_page) > _MAX_PAGES:
        click.echo(f"\n{len(by_page) - _MAX_PAGES} more pages contain {query!r}. Another word makes the list shorter.")
    click.echo("\n`smqrt help PAGE` prints a page.")


def _show(page: str) -> None:
    if not sys.stdout.isatty():
        click.echo(page, nl=False)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console(width=min(100, Console().width)).print(Markdown(page, hyperlinks=False))


def main() -> None:
    """The command `smqrt`, also `python -m smqrt`. Exit codes: 0 done, 1 could not, 2 called wrongly."""
    if sys.platform != "linux":
        sys.exit(f"smqrt runs on Linux; this is {sys.platform}. On Windows use WSL, on a Mac a virtual machine.")
    if sys.argv[1:2] in (["serve"], ["demo"]):
        # The first act, before anything imports ssl or threading: Python applications may use blocking libraries.
        from gevent import monkey

        monkey.patch_all()
    if logging.lastResort:  # what prints warnings and errors while nobody has set up logging
        logging.lastResort.setFormatter(PrintableFormatter())
    cli(prog_name="smqrt")
