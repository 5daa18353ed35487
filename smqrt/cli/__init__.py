"""Command-line interface.

The commands `new` and `help` are here. The module of every other command is imported when the command runs.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

import click

from smqrt import __version__
from smqrt.errors import SmqrtError, StartError
from smqrt.printable import PrintableFormatter, printable

_COMMANDS = {
    "serve": ("smqrt.cli.serve", "serve", "Start a server and run applications."),
    "demo": ("smqrt.cli.serve", "demo", "Start a server with the demonstration applications."),
    "backup": ("smqrt.cli.backup", "backup", "Copy the files of a server while it runs."),
    "config": ("smqrt.cli.config", "config", "Show and check settings."),
    "restart": ("smqrt.cli.service", "restart", "Restart a server without disconnecting its clients."),
    "pub": ("smqrt.cli.pubsub", "pub", "Publish messages to a topic."),
    "sub": ("smqrt.cli.pubsub", "sub", "Subscribe to topics and print their messages."),
    "request": ("smqrt.cli.pubsub", "request", "Publish a message and print the reply."),
    "servers": ("smqrt.cli.admin", "list_servers", "List the running servers of this user."),
    "top": ("smqrt.cli.admin", "top", "Show the load of a running server, live."),
    "peers": ("smqrt.cli.admin", "peers", "List the clients of a running server."),
    "topics": ("smqrt.cli.admin", "topics", "List the topics of a running server."),
    "retained": ("smqrt.cli.mqtt", "retained", "List and delete retained messages of MQTT clients."),
    "sessions": ("smqrt.cli.mqtt", "sessions", "List, disconnect and delete sessions of MQTT clients."),
    "cluster": ("smqrt.cli.admin", "cluster", "Show, drain and plan the nodes of a cluster."),
    "trace": ("smqrt.cli.admin", "trace", "Show the events of a client or a topic, live."),
    "dashboard": ("smqrt.cli.admin", "dashboard", "Print a Grafana dashboard."),
    "new": ("smqrt.cli", "new", "Create an application from a template."),
    "passwd": ("smqrt.cli.identity", "passwd", "Add, change or remove a user of a users file."),
    "acl": ("smqrt.cli.identity", "acl", "Check the permissions of a user."),
    "check": ("smqrt.cli.check", "check", "List calls of a Lua application that smqrt does not support."),
    "lua": ("smqrt.cli.lua", "lua", "Open a Lua prompt in a running application."),
    "lua-stubs": ("smqrt.cli.lua", "lua_stubs", "Write annotations of the Lua API for editors."),
    "bench": ("smqrt.cli.pubsub", "bench", "Measure a running broker."),
    "pipeline": ("smqrt.cli.pipeline", "pipeline", "Run Spark queries on the messages of a hub."),
    "journal": ("smqrt.cli.journal", "journal", "Inspect, compact, export and replay recorded messages."),
    "health": ("smqrt.cli.admin", "health", "Check whether a server is running."),
    "systemd-unit": ("smqrt.cli.service", "systemd_unit", "Print a systemd unit."),
    "query": ("smqrt.cli.query", "query", "Run a SQL query on recorded messages."),
    "help": ("smqrt.cli", "help_", "Print or search the manual."),
}
"""Module, function and one-line help of each command, in the order of `smqrt --help`."""


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Pause the garbage collector while modules are imported, then exempt their objects from later collections.

    Nearly all of these objects exist until the process exits; collections would take a tenth of the start-up time.
    """
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
        with without_garbage_collection():
            command = getattr(import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; the error for an unknown one suggests what was meant."""
        name = args[0]
        if name in _COMMANDS or name.startswith("-"):
            return super().resolve_command(ctx, args)
        near = get_close_matches(name[:64], _COMMANDS, 1)  # cut, because this takes quadratic time
        if Path(name).exists():
            hint = f"To serve the application {name}, type: smqrt serve {name}"
        elif near:
            hint = f"Did you mean {near[0]!r}?"
        else:
            hint = "`smqrt --help` lists the commands."
        raise click.UsageError(f"No such command {printable(name)!r}. {hint}", ctx)

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
    """SMQ broker and Lua application server.

    `smqrt COMMAND --help` describes a command; `smqrt help` lists the pages of the manual.
    """


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--python", is_flag=True, help="Use the Python template instead of the Lua one.")
def new(folder: Path, python: bool) -> None:
    """Create an application from a template in FOLDER.

    FOLDER is created when it does not exist; otherwise it must be empty. A Lua application also gets .luarc.json and
    the annotations of `smqrt lua-stubs`, for editors with LuaLS.
    """
    from importlib import resources  # slow to import, and no other command needs it

    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise StartError(f"{folder} is not empty. Choose a new folder.")
        with resources.as_file(
            resources.files("smqrt.cli") / ("template_python" if python else "template")
        ) as template:
            for file in sorted(template.iterdir()):
                (folder / file.name).write_bytes(file.read_bytes())
        if not python:
            from smqrt.cli.lua import STUBS_FOLDER, write_luarc, write_stubs

            write_stubs(folder / STUBS_FOLDER)
            write_luarc(folder)
    except OSError as error:
        raise StartError(f"Cannot create {folder}: {error.strerror}.") from None
    click.echo(f"Created an application in {folder}. Start it with: smqrt serve --reload {folder}")


@click.command("help")
@click.argument("words", nargs=-1, metavar="[PAGE | WORD...]")
def help_(words: tuple[str, ...]) -> None:
    """Print a PAGE of the manual, or search the manual.

    Without arguments, list the pages. With several WORDs, list the sections that contain all of them.

    \b
    Examples:
      smqrt help                  list the pages
      smqrt help settings         print the page "settings"
      smqrt help send queue       list the sections with both words
    """
    from smqrt.manual import pages as manual

    pages = manual.pages()
    query = " ".join(words).strip()
    name = query.lower().removesuffix(".md").replace(" ", "-")
    if query and name not in pages:
        _search(pages, query)
    elif query and sys.stdout.isatty():
        from rich.console import Console
        from rich.markdown import Markdown

        Console(width=min(100, Console().width)).print(Markdown(pages[name], hyperlinks=False))
    elif query:
        click.echo(pages[name], nl=False)
    else:
        width = max(len(page) for page in pages if "/" not in page)
        for group in manual.groups(pages):
            click.echo(f"{group.part}{': ' if group.title else ''}{group.title}")
            for page in group.names:
                click.echo(f"  {page:{width}}  {manual.title(pages[page])}")
            click.echo()
        click.echo("`smqrt help PAGE` prints a page, `smqrt help WORD` searches all pages.")


_MAX_PAGES, _MAX_SECTIONS = 12, 3  # sections of each page


def _search(pages: dict[str, str], query: str) -> None:
    """Print the sections that contain all words of a query, by page.

    Raises:
        click.UsageError: no section contains them.
    """
    from shutil import get_terminal_size

    from smqrt.manual import pages as manual

    near = manual.near_names(pages, query)
    hint = f"Did you mean: {', '.join(near)}?" if near else ""
    by_page: dict[str, list[manual.Found]] = {}
    for found in manual.find(manual.all_sections(pages), query):
        by_page.setdefault(found.section.page, []).append(found)
    if not by_page:
        raise click.UsageError(
            f"no page of the manual is named {query!r} or contains it. "
            + (hint or "`smqrt help` lists the pages, such as quick-start.")
        )
    if hint:
        click.echo(f"{hint}\n")
    width = min(100, get_terminal_size().columns)  # longer lines are hard to read
    for name, all_found in list(by_page.items())[:_MAX_PAGES]:
        click.echo(f"{name}: {manual.title(pages[name])}")
        for found in all_found[:_MAX_SECTIONS]:
            if found.section.anchor:
                click.echo(f"  {found.section.heading}")
            if found.line:
                click.echo(f"    {manual.excerpt(found.line, query, width - 4)}")
        if len(all_found) > _MAX_SECTIONS:
            click.echo(f"  and {len(all_found) - _MAX_SECTIONS} more sections")
    if len(by_page) > _MAX_PAGES:
        click.echo(f"\n{len(by_page) - _MAX_PAGES} more pages contain {query!r}. Add a word to narrow the search.")
    click.echo("\n`smqrt help PAGE` prints a page.")


def main() -> None:
    """Run the command `smqrt` or `python -m smqrt`.

    Exit codes: 0 success, 1 failure, 2 wrong usage.
    """
    if sys.platform != "linux":
        sys.exit(f"smqrt needs Linux; this is {sys.platform}. Use WSL on Windows, a virtual machine on macOS.")
    if sys.argv[1:2] in (["serve"], ["demo"]):
        # Before anything imports ssl or threading, so that blocking libraries of Python applications are patched too.
        from gevent import monkey

        monkey.patch_all()
    if logging.lastResort:  # prints warnings and errors until a command configures logging
        logging.lastResort.setFormatter(PrintableFormatter())
    cli(prog_name="smqrt")
